"""Programs that build the product, write its generated files and bring up clusters.

`make` calls each as `python -m tools.NAME`.
"""

"""The catalogue: every finding of the product that does not come from a rule of the rule book.

One TOML file per topic describes the findings; `book.py` reads these files and creates findings. All other terms (failure
classes, conditions, reasons) are described in `api/documentation.py`.
"""

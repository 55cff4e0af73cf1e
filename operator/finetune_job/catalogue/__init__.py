"""The catalogue: every finding of the product that does not come from a rule of the rule book.

A TOML file per topic describes the findings; `book.py` reads them and creates findings. All other words (failure classes,
conditions, reasons) are in `api/documentation.py`.
"""

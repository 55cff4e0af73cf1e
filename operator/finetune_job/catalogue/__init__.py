"""The catalogue: every id of a finding that the product can print, declared once.

`entry.py` says what an entry is; one module per topic declares the findings that the rule book (`rules/`) does not make;
`book.py` joins them and makes findings. `api/documentation.py` knows every other word: failure classes, conditions, reasons.
"""

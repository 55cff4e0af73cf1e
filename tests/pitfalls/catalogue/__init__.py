"""The decision table: every documented pitfall once, what the locked libraries do, and what this product does about it.

`python -m tests.pitfalls.catalogue > docs/pitfalls.md` writes the page.
"""

from __future__ import annotations

from importlib import import_module

from tests.pitfalls.catalogue.entry import Entry

MODULES = ("entries_001_027", "entries_028_064", "entries_065_118", "entries_119_173")
COUNT = 173


def entries() -> tuple[Entry, ...]:
    """All entries by number."""
    found = [entry for name in MODULES for entry in import_module(f"{__name__}.{name}").ENTRIES]
    return tuple(sorted(found, key=lambda entry: entry.number))

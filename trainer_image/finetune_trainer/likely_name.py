"""Finds the name in a directory that a user may have meant by a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LIKELY = 0.75
"""Least share of equal letters."""
MOST_NAMES = 1000
"""Bound of compared names: a directory of data can hold millions."""


def likely_address(address: str, names: Collection[str]) -> str | None:
    """The address with the most similar name in place of its last part, or None if none is similar."""
    before, slash, last = address.rstrip("/").rpartition("/")
    if not slash or before.endswith("/"):
        # The part after the two slashes of an address is no name in a directory.
        return None
    similar = difflib.get_close_matches(last, sorted(names)[:MOST_NAMES], n=1, cutoff=LIKELY)
    return f"{before}/{similar[0]}" if similar else None

"""Which of the names in a directory somebody may have meant who wrote another one."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LIKELY = 0.75
"""From this share of equal letters on."""
MOST_NAMES = 1000
"""That are compared: a directory of data can hold millions."""


def likely_address(address: str, names: Collection[str]) -> str | None:
    """The address with the name in place of its last part that is most like it; None: none is."""
    before, slash, last = address.rstrip("/").rpartition("/")
    if not slash or before.endswith("/"):
        # What comes after the two slashes of an address is no name in a directory.
        return None
    found = difflib.get_close_matches(last, sorted(names)[:MOST_NAMES], n=1, cutoff=LIKELY)
    return f"{before}/{found[0]}" if found else None

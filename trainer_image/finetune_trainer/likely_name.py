"""Which of the names in a directory somebody may have meant who wrote another one."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LIKELY = 0.75
"""From this share of equal letters on."""


def likely_address(address: str, names: Collection[str]) -> str | None:
    """The address with the name in place of its last part that is most like it; None: none is."""
    before, slash, last = address.rstrip("/").rpartition("/")
    found = difflib.get_close_matches(last, sorted(names), n=1, cutoff=LIKELY) if slash and before[-1:] != "/" else []
    return f"{before}/{found[0]}" if found else None

"""Finds the name in a directory that a user may have meant by a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LIKELY = 0.75
"""Minimum similarity (difflib's ratio) for a name to be proposed."""
MOST_NAMES = 1000
"""Maximum number of names to compare, since a data directory can hold millions."""


def likely_address(address: str, names: Collection[str]) -> str | None:
    """The address with its last part replaced by the most similar name; None if no name is similar."""
    before, slash, last = address.rstrip("/").rpartition("/")
    if not slash or before.endswith("/"):
        # Only the part right after `scheme://` is left, which is not the name of a file.
        return None
    similar = difflib.get_close_matches(last, sorted(names)[:MOST_NAMES], n=1, cutoff=LIKELY)
    return f"{before}/{similar[0]}" if similar else None

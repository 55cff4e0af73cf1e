"""Mismatches that are understood as far as this page says, and not mended yet. They are counted and printed apart; any other fails
the sweep."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = ()
"""Regular expression over a result's text, and what is known of it."""


def what_is_known(text: str) -> str | None:
    """What is known of a mismatch; None: nothing."""
    return next((said for pattern, said in KNOWN if re.search(pattern, text, re.DOTALL)), None)

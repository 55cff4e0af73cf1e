"""Decides when jobs continue although their usage cannot be recorded. Accounting may delay a job for a short time, but never
stop it.
"""

from __future__ import annotations

from datetime import datetime, timedelta

PATIENCE = timedelta(seconds=120)
"""How long passes are delayed for an error that may be temporary, for example while an API server is replaced."""


def failing_since(before: datetime | None, now: datetime) -> datetime:
    """Since when records have failed in a row. A clock that was set back does not prolong this."""
    return now if before is None else min(before, now)


def continues_uncounted(since: datetime, now: datetime, *, is_refusal: bool) -> bool:
    """Whether jobs continue. `is_refusal`: the server will refuse it until somebody changes something."""
    return is_refusal or now - since >= PATIENCE

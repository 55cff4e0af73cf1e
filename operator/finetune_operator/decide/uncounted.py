"""When jobs go on although what they use cannot be put on record. An account is worth a short wait, and never a job."""

from __future__ import annotations

from datetime import datetime, timedelta

PATIENCE = timedelta(seconds=120)
"""How long passes are put off for an error that may pass, such as that of an API server which is being replaced."""


def failing_since(before: datetime | None, now: datetime) -> datetime:
    """Since when records have failed without one in between that went well. A clock that was set back does not prolong it."""
    return now if before is None else min(before, now)


def continues_uncounted(since: datetime, now: datetime, *, is_refusal: bool) -> bool:
    """Whether jobs continue. `is_refusal`: the server will say the same until somebody changes something."""
    return is_refusal or now - since >= PATIENCE

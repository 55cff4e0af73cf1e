"""Times in status: RFC 3339, UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def timestamp(moment: datetime) -> str:
    """A moment as status shows it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_after(text: str, seconds: float) -> datetime | None:
    """So many seconds after a moment in status; None for one that `timestamp` did not write: somebody has edited the status, and
    no pass may end in that.
    """
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) + timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        return None

"""The pause that a server asks for."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def asked_pause_seconds(retry_after: str | None) -> float | None:
    """Seconds, from either form of a Retry-After header (RFC 9110, section 10.2.3); None where there is none."""
    text = (retry_after or "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None

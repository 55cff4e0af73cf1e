"""The meaning of HTTP statuses and Retry-After headers from any server (RFC 9110, and statuses that proxies add)."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
"""Statuses after which the same request may succeed later."""
UNAUTHORIZED = 401
DENIED = frozenset({UNAUTHORIZED, 403})
NOT_FOUND = 404
ABSENT = frozenset({NOT_FOUND, 410})
FULL = frozenset({413, 507})
"""Statuses of a server that accepts no more bytes, either in one request or in total."""


def parse_retry_after(retry_after: str | None) -> float | None:
    """Return the seconds to wait from either form of a Retry-After header (RFC 9110, section 10.2.3); None if it is not valid."""
    text = (retry_after or "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None

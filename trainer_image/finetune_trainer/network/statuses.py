"""What HTTP statuses mean, whatever answers with them (RFC 9110, and what proxies add to it)."""

from __future__ import annotations

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
"""The same request may succeed later."""
UNAUTHORIZED = 401
DENIED = frozenset({UNAUTHORIZED, 403})
NOT_FOUND = 404
ABSENT = frozenset({NOT_FOUND, 410})
FULL = frozenset({413, 507})
"""More than the server takes: of one request, or altogether."""

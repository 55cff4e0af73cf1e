"""Answers from the API server and from proxies in front of it: exceptions, Retry-After, parsing, and a size limit."""

from __future__ import annotations

import json
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from aiohttp import StreamReader


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, request: str, code: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{request}: {code} {reason}: {message}")
        self.code = code
        """HTTP status."""
        self.reason = reason
        """The server's machine-readable reason, such as `AlreadyExists`; empty if it gave none."""
        self.message = message
        """The server's message."""
        self.retry_after = retry_after
        """Seconds that the server asked to wait; 0 if it did not ask."""

    @property
    def is_not_found(self) -> bool:
        """Whether the object, or the object that should contain it, does not exist."""
        return self.code == 404

    @property
    def is_conflict(self) -> bool:
        """Whether a precondition (resourceVersion or UID) does not hold."""
        return self.code == 409 and self.reason != "AlreadyExists"

    @property
    def is_already_exists(self) -> bool:
        """Whether the name is taken."""
        return self.code == 409 and self.reason == "AlreadyExists"

    @property
    def is_refusal(self) -> bool:
        """Whether the server will keep refusing until somebody changes something: a quota, Pod Security, an admission webhook or
        policy, an invalid template, a namespace that is being deleted. An overload, which ends on its own, is not a refusal, and
        neither is a taken name.
        """
        if self.code in (401, 408, 409, 410, 429):
            return False
        return 400 <= self.code < 500 or (self.code == 500 and "webhook" in self.message)


class ApiUnreachableError(Exception):
    """No answer came, so it is not known whether the request was carried out."""


class NotLeadingError(ApiUnreachableError):
    """The request was not sent, because another replica may hold the lease by now. This is a subclass of ApiUnreachableError, so
    code that handles an unreachable server also handles this. The process ends when its lease thread notices the loss.
    """


Document = dict[str, Any]
SHORTEST_RETRY_AFTER = 0.1
LONGEST_RETRY_AFTER = 30.0


class AnsweredRequest(NamedTuple):
    """One request that was sent, for the metrics."""

    verb: str
    """HTTP method, or LIST."""
    resource: str
    """Plural and subresource, such as `jobs` or `finetunejobs/status`."""
    code: str
    """HTTP status, or `error` if no answer came."""
    reason: str
    """The server's reason for a refusal, such as `AlreadyExists`; empty if there is none."""


def retry_after_seconds(value: str | None, now: float) -> float:
    """Return the seconds to wait by a Retry-After header (seconds or a date), up to a maximum; 0 if it cannot be parsed.

    `now`: seconds since the epoch.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdigit():
        # Cut long numbers before parsing them: beyond the maximum, their value does not matter.
        seconds = float(text[:9])
    else:
        try:
            moment = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError, OverflowError):
            return 0.0
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
    return min(max(seconds, SHORTEST_RETRY_AFTER), LONGEST_RETRY_AFTER)


def resource_of(path: str) -> str:
    """Return plural and subresource of a path, for use as a metric label; empty if the path is not that of a resource."""
    parts = path.split("/")[1:]
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
    if len(parts) > 2 and parts[0] == "namespaces":
        parts = parts[2:]
    return "/".join([*parts[:1], *parts[2:3]])


def document_of(request: str, content: bytes) -> Document:
    """Parse an answer. If it is not a JSON object, it came from something between us and the API server."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ApiUnreachableError(f"{request}: the answer is not JSON: {content[:100]!r}") from error
    if not isinstance(document, dict):
        raise ApiUnreachableError(f"{request}: the answer is not an object: {content[:100]!r}")
    return document


def refusal_of(verb: str, path: str, code: int, retry_after: float, content: bytes) -> ApiError:
    try:
        status = json.loads(content)
        reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", content.decode(errors="replace")[:500]
    return ApiError(f"{verb} {path}", code, reason, message, retry_after)


async def read_at_most(content: StreamReader, limit: int) -> bytes:
    """Read the first `limit` bytes of an answer, or the whole answer if it is shorter.

    A single `read` of aiohttp would only return what has arrived so far, which may end in the middle of a line.
    """
    blocks, size = [], 0
    while size < limit and (block := await content.read(limit - size)):
        blocks.append(block)
        size += len(block)
    return b"".join(blocks)

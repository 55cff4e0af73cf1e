"""What can go wrong between us and the API server."""

from __future__ import annotations


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, request: str, code: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{request}: {code} {reason}: {message}")
        self.code = code
        """HTTP status."""
        self.reason = reason
        """Machine-readable, as in `AlreadyExists`; empty where the server gave none."""
        self.message = message
        """The server's words."""
        self.retry_after = retry_after
        """Seconds that the server asked to wait; 0: it did not ask."""

    @property
    def is_not_found(self) -> bool:
        """The object, or what it should be in, does not exist."""
        return self.code == 404

    @property
    def is_conflict(self) -> bool:
        """A precondition (resourceVersion or UID) does not hold."""
        return self.code == 409 and self.reason != "AlreadyExists"

    @property
    def is_already_exists(self) -> bool:
        """The name is taken."""
        return self.code == 409 and self.reason == "AlreadyExists"


class ApiUnreachableError(Exception):
    """No answer: whether the request was carried out is not known."""


class NotLeadingError(ApiUnreachableError):
    """Not sent: another replica may hold the lease by now. A kind of unreachable server, so whoever survives one survives this;
    the process ends when its lease thread sees the same.
    """

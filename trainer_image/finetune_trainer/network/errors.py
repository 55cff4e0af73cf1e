"""Failures of single requests, and the end of work that was given up. What may pass by itself is retried first."""

from __future__ import annotations


class TransientError(Exception):
    """One request failed in a way that may pass. The message holds no address, because signed addresses are credentials."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """What the server asked for."""


class StoppedError(Exception):
    """Something else has failed or the process is to end, so this is given up."""

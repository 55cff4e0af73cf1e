"""Retries requests that may succeed later, with exponential backoff and jitter, up to a number of failures in a row."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
LOOK_SECONDS = 0.1
"""Seconds between two checks of whether a pause should end early."""
RetriesExhausted = Callable[[str], Exception]
"""A function that takes a description of the last failure, and returns the error that ends the role."""


class TransientError(Exception):
    """A request failed, but may succeed later. The message holds no address, because signed addresses are credentials."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """Pause that the server asked for, in seconds; None if it asked for none."""


class StoppedError(Exception):
    """The operation is abandoned, since something else has failed or the process is ending."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and after which pauses, requests to a service are retried."""

    attempts: int = 8
    """Number of failures in a row, without progress in between, after which the operation is abandoned."""
    first_seconds: float = 1.0
    """Pause after the first failure; each further failure doubles it."""
    longest_seconds: float = 60.0
    longest_retry_after_seconds: float = 300.0
    """Longest pause that a server may ask for. If it asks for more, the whole role's attempt ends."""


def pause_seconds(policy: RetryPolicy, failures: int, retry_after_seconds: float | None, jitter: float) -> float | None:
    """Return the pause in seconds after this number of failures in a row; None means to give up.

    jitter: a random number from 0 to 1. Half of the pause depends on it, so that pods that failed together retry separately.
    """
    if failures >= policy.attempts or (retry_after_seconds or 0.0) > policy.longest_retry_after_seconds:
        return None
    backoff: float = min(policy.longest_seconds, policy.first_seconds * 2.0 ** (failures - 1)) * (1.0 + jitter) / 2.0
    return max(backoff, retry_after_seconds or 0.0)


class Retries:
    """Counts an operation's failures in a row, and waits after each."""

    def __init__(self, what: str, policy: RetryPolicy, stop: threading.Event, given_up: RetriesExhausted) -> None:
        self._what, self._policy, self._stop, self._given_up = what, policy, stop, given_up
        self._failures = 0

    def progressed(self) -> None:
        """Record that the last request made progress."""
        self._failures = 0

    def failed(self, error: TransientError) -> None:
        """Record a failure and wait before the next request. Raises StoppedError, or the error that `given_up` returns."""
        self._failures += 1
        pause = pause_seconds(self._policy, self._failures, error.retry_after_seconds, random.random())  # noqa: S311
        if pause is None:
            raise self._given_up(
                f"{self._what}: {error} (request {self._failures} of {self._policy.attempts} in a row without success)"
            )
        log.warning("%s: %s; trying again in %.1f s", self._what, error, pause)
        # `stop.wait` is not used, because this thread may hold the event's lock while it waits. If a signal handler then set the
        # event, it would wait for that lock forever.
        deadline = time.monotonic() + pause
        while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
        if self._stop.is_set():
            raise StoppedError


def with_retries(
    what: str, policy: RetryPolicy, stop: threading.Event, given_up: RetriesExhausted, operation: Callable[[], T]
) -> T:
    """Call `operation` until it no longer raises TransientError. Raises StoppedError, or the error that `given_up` returns."""
    retries = Retries(what, policy, stop, given_up)
    while True:
        try:
            return operation()
        except TransientError as error:
            retries.failed(error)

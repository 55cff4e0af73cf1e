"""Retries with exponential backoff and jitter, bounded by failures in a row."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from finetune_trainer.network.errors import StoppedError, TransientError

log = logging.getLogger(__name__)
T = TypeVar("T")
GivenUp = Callable[[str], Exception]
"""Makes the failure that ends the role, from what is to be said of the last request."""


@dataclass(frozen=True)
class Patience:
    """How long a service may fail."""

    attempts: int = 8
    """Requests in a row that bring nothing new."""
    first_seconds: float = 1.0
    """Pause after the first failure; each further one doubles it."""
    longest_seconds: float = 60.0
    longest_retry_after_seconds: float = 300.0
    """A server that wants a longer pause is not waited for: the attempt of the whole role ends instead."""


def pause_seconds(patience: Patience, failures: int, retry_after_seconds: float | None, jitter: float) -> float | None:
    """Pause after so many failures in a row; None: give up.

    `jitter`: 0 to 1. Half of the pause is fixed and half is random, so that pods that failed together do not come back together.
    """
    if failures >= patience.attempts or (retry_after_seconds or 0.0) > patience.longest_retry_after_seconds:
        return None
    backoff: float = min(patience.longest_seconds, patience.first_seconds * 2.0 ** (failures - 1)) * (1.0 + jitter) / 2.0
    return max(backoff, retry_after_seconds or 0.0)


class Attempts:
    """Failures in a row of one thing that is asked for."""

    def __init__(self, what: str, patience: Patience, stop: threading.Event, given_up: GivenUp) -> None:
        self._what, self._patience, self._stop, self._given_up = what, patience, stop, given_up
        self._failures = 0

    def progressed(self) -> None:
        """The last request brought something."""
        self._failures = 0

    def failed(self, error: TransientError) -> None:
        """Wait before the next request. Raises what `given_up` makes, and StoppedError."""
        self._failures += 1
        pause = pause_seconds(self._patience, self._failures, error.retry_after_seconds, random.random())  # noqa: S311
        if pause is None:
            raise self._given_up(
                f"{self._what}: {error} (request {self._failures} of {self._patience.attempts} in a row without success)"
            )
        log.warning("%s: %s; again in %.1f s", self._what, error, pause)
        if self._stop.wait(pause):
            raise StoppedError


def retried(what: str, patience: Patience, stop: threading.Event, given_up: GivenUp, operation: Callable[[], T]) -> T:
    """The result of `operation`, asked for again while it raises TransientError. Raises what `given_up` makes, and StoppedError."""
    attempts = Attempts(what, patience, stop, given_up)
    while True:
        try:
            return operation()
        except TransientError as error:
            attempts.failed(error)

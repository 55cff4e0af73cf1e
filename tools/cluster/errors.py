"""The test cluster's errors, and a wait for a condition with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 0.3
"""Longest pause between two checks. Most checks ask a server on the same cores as the test, so pauses grow to this."""
_POLLS_PER_WAIT = 10
"""Polling makes a wait at most a tenth longer."""


class ClusterError(RuntimeError):
    """The test cluster cannot do something; the message names the component, its log and the fix."""


class WaitTimeoutError(ClusterError):
    """A condition did not come true before its deadline."""


def wait_until(condition: Callable[[], _Result], what: str, seconds: float) -> _Result:
    """Call `condition` until its result is true, and return that result.

    Raises:
        WaitTimeoutError: `condition` was still false after `seconds`.
    """
    begun = time.monotonic()
    while True:
        result = condition()
        if result:
            return result
        waited = time.monotonic() - begun
        if waited >= seconds:
            raise WaitTimeoutError(f"timed out after {seconds:.0f} s of waiting for {what}")
        time.sleep(min(max(waited / _POLLS_PER_WAIT, _POLL_SECONDS), _LONGEST_POLL_SECONDS))

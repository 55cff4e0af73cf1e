"""The test cluster's error, and waiting for a condition with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

_POLL_SECONDS = 0.05


class ClusterError(RuntimeError):
    """The test cluster cannot do what was asked; the message names the component, its log and the fix."""


class WaitTimeoutError(ClusterError):
    """A condition did not come true before its deadline."""


def wait_until(condition: Callable[[], _Result], what: str, seconds: float) -> _Result:
    """Call `condition` until its result is true, and return that result.

    Raises:
        WaitTimeoutError: `condition` was still false after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            raise WaitTimeoutError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(_POLL_SECONDS)

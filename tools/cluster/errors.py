"""The test cluster's error, and waiting for a condition with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 0.3
"""What is asked for is asked of a server, as a rule, whose cores the test shares."""
_POLLS_PER_WAIT = 10
"""A wait becomes longer by a tenth of itself at most."""


class ClusterError(RuntimeError):
    """The test cluster cannot do what was asked; the message names the component, its log and the fix."""


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
            raise WaitTimeoutError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(min(max(waited / _POLLS_PER_WAIT, _POLL_SECONDS), _LONGEST_POLL_SECONDS))

"""What all suites share: the profiles of the property tests.

By default the examples are the same on every run, so that a change is judged by its own merits and not by luck. `make explore`
draws new ones; what it finds becomes a case of its own.

A log that nobody has configured shows plain tracebacks: those with the values of all variables take seconds for a job and its plan.

Torch computes with one thread, as `tests.suites` has it: with more the order of sums, and so the last bit, depends on the machine.
"""

import gc
import os

import structlog
from hypothesis import settings

from tests.support import collector

collector.collect_rarely()
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


def pytest_collection_finish() -> None:
    """All tests, and the libraries that they import, are loaded."""
    collector.leave_what_is_there()


def pytest_unconfigure() -> None:
    """Libraries that count what is left of their objects at the end complain of what is frozen."""
    gc.unfreeze()

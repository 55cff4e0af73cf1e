"""Bounds the time that a chat template may take for one record, no matter who wrote the template. Called by tokenize.py.

Two timers measure this process's CPU time, so that nothing is refused because a machine is busy. The first raises an exception
within the template. The second kills the process if its code cannot be interrupted, for example while it compares nested lists.
The process that forked this one (worker.py) then learns from the `RecordNote` which record was being rendered.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

RENDER_SECONDS = 10.0
"""CPU time after which an exception is raised. A chat of thousands of turns takes a second."""
END_SECONDS = 2 * RENDER_SECONDS
"""CPU time after which the process ends."""
ENDED_BY = signal.SIGVTALRM
"""Signal of the second timer, which ends the process because it has no handler."""
_AGAIN_SECONDS = 1.0
"""Time after which the exception is raised again, in case the template's code swallows it."""

RecordNote = memoryview
"""Shared memory that holds one integer: the line of the record that a process is rendering, or 0."""


class _TooSlow(BaseException):
    """Raised within the template's code. It is a BaseException, so that no library's `except Exception` catches it."""


class RenderTimeoutError(Exception):
    """The template did not finish."""


@contextmanager
def render_limit(line: int, note: RecordNote | None) -> Iterator[None]:
    """Bound the time to render the record at `line`. Raises RenderTimeoutError. Without a `note`, the process is never killed."""

    def interrupt(_number: int, _frame: Any) -> NoReturn:
        raise _TooSlow

    is_interruptible = threading.current_thread() is threading.main_thread()
    if is_interruptible:
        signal.signal(signal.SIGPROF, interrupt)
        signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS, _AGAIN_SECONDS)
    if note is not None:
        note[0] = line
        signal.setitimer(signal.ITIMER_VIRTUAL, END_SECONDS)
    try:
        yield
    except _TooSlow as error:
        raise RenderTimeoutError(f"takes more than {RENDER_SECONDS:g} s of CPU time") from error
    finally:
        if is_interruptible:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if note is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            note[0] = 0

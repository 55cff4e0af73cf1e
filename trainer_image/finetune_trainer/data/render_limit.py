"""A bound on the time that a chat template may take for one record, whoever wrote the template. Called by tokenize.py.

There are two timers, both of this process's CPU time, so that a slow machine refuses nothing. The first raises an exception
within the template. The second ends the process, for code that no exception interrupts, such as the comparison of nested lists.
From `RecordNote` the process that started this one (workers.py) learns which record it was.
"""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

RENDER_SECONDS = 10.0
"""CPU time for one record. A chat of thousands of turns takes a second."""
END_SECONDS = 2 * RENDER_SECONDS
"""CPU time after which the process ends."""
ENDED_BY = signal.SIGVTALRM
"""Signal of the second timer, which ends the process because it has no handler."""
_AGAIN_SECONDS = 1.0
"""Time between exceptions, in case one is swallowed."""
_NOTE = struct.Struct("<qd")


class _TooSlow(BaseException):
    """Raised within the template's code. A BaseException, so that no `except Exception` of a library stops it."""


class RenderTimeoutError(Exception):
    """The template did not finish."""


@dataclass(frozen=True)
class RecordNote:
    """Memory in which a process notes the record that it is rendering, for the process that started it. descriptor: of this
    memory.
    """

    descriptor: int

    def begin(self, line: int) -> None:
        os.pwrite(self.descriptor, _NOTE.pack(line, time.monotonic()), 0)

    def end(self) -> None:
        os.pwrite(self.descriptor, _NOTE.pack(0, 0.0), 0)

    def read(self) -> tuple[int, float]:
        """Line of the record, 0 if none is being rendered, and the time at which rendering began (time.monotonic)."""
        written = os.pread(self.descriptor, _NOTE.size, 0)
        line, since = _NOTE.unpack(written) if len(written) == _NOTE.size else (0, 0.0)
        return line, since


def new_note() -> RecordNote:
    """Create a note in memory. Raises OSError."""
    return RecordNote(os.memfd_create("record"))


@contextmanager
def render_limit(line: int, note: RecordNote | None) -> Iterator[None]:
    """Bound the rendering of the record at `line`. Raises RenderTimeoutError; without a `note` the process is not ended."""
    is_interruptible = threading.current_thread() is threading.main_thread()
    if is_interruptible:
        signal.signal(signal.SIGPROF, _raise)
        signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS, _AGAIN_SECONDS)
    if note is not None:
        note.begin(line)
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
            note.end()


def _raise(_number: int, _frame: Any) -> NoReturn:
    raise _TooSlow

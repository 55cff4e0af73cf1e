"""A bound on the time that a chat template may take for one record, no matter who wrote the template. Called by tokenize.py.

Two timers, both of this process's CPU time, so that a slow machine refuses nothing. The first raises an exception within the
template. The second is for what no exception reaches, such as the comparison of lists within lists: it ends the process, and
`RecordNote` tells the process that started this one which record it was (workers.py).
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
"""Of CPU time. A chat of thousands of turns takes a second."""
END_SECONDS = 2 * RENDER_SECONDS
"""Of CPU time, after which the process ends."""
ENDED_BY = signal.SIGVTALRM
"""What ends it: the signal of a timer that nothing here handles."""
_AGAIN_SECONDS = 1.0
"""Between exceptions, should one be swallowed."""
_NOTE = struct.Struct("<qd")


class _TooSlow(BaseException):
    """Raised within the template's code, where no `except Exception` of a library may stop it."""


class RenderTimeoutError(Exception):
    """The template did not come to an end."""


@dataclass(frozen=True)
class RecordNote:
    """Where a process writes which record it is rendering, for the one that started it. `descriptor`: of a file of its own."""

    descriptor: int

    def begin(self, line: int) -> None:
        os.pwrite(self.descriptor, _NOTE.pack(line, time.monotonic()), 0)

    def end(self) -> None:
        os.pwrite(self.descriptor, _NOTE.pack(0, 0.0), 0)

    def read(self) -> tuple[int, float]:
        """Line of the record, 0 where none is being rendered, and since when (time.monotonic)."""
        written = os.pread(self.descriptor, _NOTE.size, 0)
        line, since = _NOTE.unpack(written) if len(written) == _NOTE.size else (0, 0.0)
        return line, since


def new_note() -> RecordNote:
    """One in memory. Raises OSError."""
    return RecordNote(os.memfd_create("record"))


@contextmanager
def render_limit(line: int, note: RecordNote | None) -> Iterator[None]:
    """For rendering the record at `line`. Raises RenderTimeoutError; without a `note` the process is not ended."""
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

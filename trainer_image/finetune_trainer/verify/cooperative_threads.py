"""Several computations that need the same weights go through them together: each unit is loaded once for all of them.

Each is a function in a thread of its own that says through `enter` what it needs next. Only one thread runs at a time, and gives
way only in `enter`, so that nothing a function does has to be safe among threads. Knows nothing of models.

A plain loop over units would have to know how each architecture hands on what a layer gives: only the library's forward pass
does, and nothing but a thread lets one be stopped in the middle while another one runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class CooperativeThreads(Generic[Unit]):
    """Runs functions to their ends. load: called before one needs a unit. release: before another is loaded, and at the end."""

    def __init__(self, load: Callable[[Unit], None], release: Callable[[Unit], None]) -> None:
        self._load, self._release = load, release
        self._here = threading.local()

    def enter(self, unit: Unit) -> None:
        """Wait until `unit` is loaded and it is this thread's turn. What was entered before must not be used any more."""
        self._here.thread.enter(unit)

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run every function in a thread. Raises what the first one that fails raises, after the others have been ended."""
        threads: list[_CooperativeThread[Unit]] = [_CooperativeThread(function, self._here) for function in functions]
        loaded: list[Unit] = []
        try:
            for thread in threads:
                thread.proceed()
            while waiting := [thread for thread in threads if thread.is_waiting]:
                ready = [thread for thread in waiting if loaded and thread.wanted == loaded[0]]
                if not ready:
                    # The thread that is furthest behind: what it needs, those ahead of it may have left out.
                    wanted = min(waiting, key=lambda thread: thread.num_entered).wanted
                    while loaded:
                        self._release(loaded.pop())
                    loaded.append(wanted)
                    self._load(wanted)
                    continue
                for thread in ready:
                    thread.proceed()
        finally:
            for thread in threads:
                thread.end()
            while loaded:
                self._release(loaded.pop())


class _Cancelled(BaseException):
    """Unwinds a thread that is not needed any more."""


class _CooperativeThread(Generic[Unit]):
    wanted: Unit

    def __init__(self, function: Callable[[], None], here: threading.local) -> None:
        self._function, self._here = function, here
        self._turn, self._gave_way = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_ending = False
        self.is_waiting, self.num_entered = False, 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def proceed(self) -> None:
        """Let the thread run until it gives way or ends. Raises what it raises."""
        self.is_waiting = False
        self._turn.release()
        self._gave_way.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Unwind the thread wherever it is."""
        self._is_ending = True
        self._turn.release()
        self._thread.join()

    def enter(self, unit: Unit) -> None:
        self.wanted, self.is_waiting = unit, True
        self.num_entered += 1
        self._gave_way.release()
        self._turn.acquire()
        if self._is_ending:
            raise _Cancelled

    def _work(self) -> None:
        self._here.thread = self
        self._turn.acquire()
        try:
            if not self._is_ending:
                with suppress(_Cancelled):
                    self._function()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that called run()
            self._error = error
        finally:
            self._gave_way.release()

"""Several computations that need the same weights go through them together: each unit is loaded once for all of them.

Each is a function in a thread of its own that says through `enter` what it needs next, and gives way only there. Functions of one
group never run at the same time, so that they may share what is not safe among threads; groups run at the same time. This module
knows nothing of models.

A plain loop over units would have to know how each architecture passes on the output of a layer. Only the library's forward pass
knows that, and only a thread lets one pass stop in the middle while another one runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class CooperativeThreads(Generic[Unit]):
    """Runs functions to their ends.

    load: called before a function needs a unit. release: called before another unit is loaded, and at the end.

    Neither is called while a function runs.
    """

    def __init__(self, load: Callable[[Unit], None], release: Callable[[Unit], None]) -> None:
        self._load, self._release = load, release
        self._here = threading.local()

    def enter(self, unit: Unit) -> None:
        """Wait until `unit` is loaded and it is this thread's turn. The previous unit must not be used any more."""
        self._here.thread.enter(unit)

    def run(self, groups: Sequence[Sequence[Callable[[], None]]]) -> None:
        """Run every function in a thread. Raises the first function's error after the other threads have ended."""
        gave_way: SimpleQueue[_CooperativeThread[Unit]] = SimpleQueue()
        threads: list[_CooperativeThread[Unit]] = [
            _CooperativeThread(function, number, gave_way, self._here)
            for number, group in enumerate(groups)
            for function in group
        ]
        loaded: list[Unit] = []
        try:
            _let_run(threads, gave_way)
            while waiting := [thread for thread in threads if thread.is_waiting]:
                ready = [thread for thread in waiting if loaded and thread.wanted == loaded[0]]
                if not ready:
                    # The thread that is furthest behind decides, since threads ahead of it may have skipped its unit.
                    wanted = min(waiting, key=lambda thread: thread.num_entered).wanted
                    while loaded:
                        self._release(loaded.pop())
                    loaded.append(wanted)
                    self._load(wanted)
                    continue
                _let_run(ready, gave_way)
        finally:
            for thread in threads:
                thread.end()
            while loaded:
                self._release(loaded.pop())


def _let_run(threads: Iterable[_CooperativeThread[Unit]], gave_way: SimpleQueue[_CooperativeThread[Unit]]) -> None:
    """Let each run until it gives way or ends, those of one group one after another. Raises the first error."""
    turns: dict[int, deque[_CooperativeThread[Unit]]] = {}
    for thread in threads:
        turns.setdefault(thread.group, deque()).append(thread)
    for group in turns.values():
        group[0].proceed()
    while turns:
        done = gave_way.get()
        if done.error is not None:
            raise done.error
        group = turns[done.group]
        group.popleft()
        if group:
            group[0].proceed()
        else:
            del turns[done.group]


class _Cancelled(BaseException):
    """Unwinds a thread that is no longer needed."""


class _CooperativeThread(Generic[Unit]):
    wanted: Unit

    def __init__(
        self,
        function: Callable[[], None],
        group: int,
        gave_way: SimpleQueue[_CooperativeThread[Unit]],
        here: threading.local,
    ) -> None:
        """gave_way: gets this thread each time that it gives way, and at its end."""
        self._function, self._gave_way, self._here = function, gave_way, here
        self._turn = threading.Semaphore(0)
        self._is_ending = False
        self.group = group
        self.error: BaseException | None = None
        self.is_waiting, self.num_entered = False, 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def proceed(self) -> None:
        """Let the thread run until it gives way or ends."""
        self.is_waiting = False
        self._turn.release()

    def end(self) -> None:
        """Unwind the thread wherever it is."""
        self._is_ending = True
        self._turn.release()
        self._thread.join()

    def enter(self, unit: Unit) -> None:
        self.wanted, self.is_waiting = unit, True
        self.num_entered += 1
        self._gave_way.put(self)
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
            self.error = error
        finally:
            self._gave_way.put(self)

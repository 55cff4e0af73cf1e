"""Several computations that need the same weights go through them together: each part is loaded once for all of them.

A lane is a function in a thread of its own that says through `enter` what it needs next. Only one lane runs at a time; a lane gives
way nowhere but in `enter`, so that nothing a lane does has to be safe among threads. Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

Part = TypeVar("Part", bound=Hashable)


class Lanes(Generic[Part]):
    """Runs lanes to their ends. load: called before any lane needs a part. release: before another is loaded, and at the end."""

    def __init__(self, load: Callable[[Part], None], release: Callable[[Part], None]) -> None:
        self._load, self._release = load, release
        self._here = threading.local()

    def enter(self, part: Part) -> None:
        """Wait until `part` is loaded and it is this lane's turn. What was entered before must not be used any more."""
        self._here.lane.enter(part)

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run every function in a lane. Raises what the first lane that fails raises, after the others have been ended."""
        lanes: list[_Lane[Part]] = [_Lane(function, self._here) for function in functions]
        loaded: list[Part] = []
        try:
            for lane in lanes:
                lane.proceed()
            while waiting := [lane for lane in lanes if lane.is_waiting]:
                ready = [lane for lane in waiting if loaded and lane.wanted == loaded[0]]
                if not ready:
                    # The lane that is furthest behind: what it needs, those ahead of it may have left out.
                    wanted = min(waiting, key=lambda lane: lane.num_entered).wanted
                    while loaded:
                        self._release(loaded.pop())
                    loaded.append(wanted)
                    self._load(wanted)
                    continue
                for lane in ready:
                    lane.proceed()
        finally:
            for lane in lanes:
                lane.end()
            while loaded:
                self._release(loaded.pop())


class _Ended(BaseException):
    """Unwinds a lane that is not needed any more."""


class _Lane(Generic[Part]):
    wanted: Part

    def __init__(self, function: Callable[[], None], here: threading.local) -> None:
        self._function, self._here = function, here
        self._turn, self._gave_way = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_ending = False
        self.is_waiting, self.num_entered = False, 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def proceed(self) -> None:
        """Let the lane run until it gives way or ends. Raises what it raises."""
        self.is_waiting = False
        self._turn.release()
        self._gave_way.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Unwind the lane wherever it is."""
        self._is_ending = True
        self._turn.release()
        self._thread.join()

    def enter(self, part: Part) -> None:
        self.wanted, self.is_waiting = part, True
        self.num_entered += 1
        self._gave_way.release()
        self._turn.acquire()
        if self._is_ending:
            raise _Ended

    def _work(self) -> None:
        self._here.lane = self
        self._turn.acquire()
        try:
            if not self._is_ending:
                with suppress(_Ended):
                    self._function()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that called run()
            self._error = error
        finally:
            self._gave_way.release()

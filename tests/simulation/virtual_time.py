"""An event loop whose time jumps to the next timer instead of waiting for it: days pass in seconds, in the same order each
time."""

import asyncio
import selectors
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")
EPOCH = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
MOST_TURNS = 100_000
"""Turns of the loop in which no time passes; beyond it something runs in circles without ever waiting."""


class StandstillError(AssertionError):
    """Every task waits for something that nobody will do, or one runs in circles while no time passes."""


class _Selector(selectors.SelectSelector):
    """Waits for no file: it only moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StandstillError("all tasks wait, and no timer is set")
        if timeout > 0:
            self.now += timeout
            self.turns = 0
        else:
            self.turns += 1
            if self.turns > MOST_TURNS:
                raise StandstillError(f"{MOST_TURNS} turns of the event loop without a pause")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; `time` is virtual seconds since the start."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now

    def now(self) -> datetime:
        """The time of day that everybody in the simulation sees."""
        return EPOCH + timedelta(seconds=self._virtual.now)


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run to the end, then cancel what is left."""
    try:
        return loop.run_until_complete(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


def stamp(moment: datetime) -> str:
    """As Kubernetes writes times: whole seconds, UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

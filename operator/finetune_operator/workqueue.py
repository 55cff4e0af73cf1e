"""A queue of keys: a key waits in it once however often it is added, and is never handed to two workers at a time.

A key that is added while a worker has it comes back when that worker is done. Delayed additions keep the earliest time.
Everything runs on one event loop; no method but `get` waits.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class QueueClosedError(Exception):
    """The queue is shut down and empty-handed: the worker ends."""


class WorkQueue(Generic[K]):
    """Keyed, de-duplicating, delayed. `clock`: monotonic seconds, the event loop's own unless a test gives another."""

    def __init__(self, *, retry_first: float, retry_longest: float, clock: Callable[[], float] | None = None) -> None:
        self._retry_first = retry_first
        self._retry_longest = retry_longest
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        """Keys in `_ready`."""
        self._taken: set[K] = set()
        self._again: set[K] = set()
        """Keys added while taken."""
        self._delayed: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        """When a delayed key is due; heap entries that say otherwise are outdated."""
        self._failures: dict[K, int] = {}
        self._order = 0
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """Keys that could be taken at once."""
        return len(self._ready)

    @property
    def num_delayed(self) -> int:
        """Keys that wait for their time."""
        return len(self._due)

    @property
    def num_taken(self) -> int:
        """Keys that workers hold."""
        return len(self._taken)

    def add(self, key: K) -> None:
        """Queue the key now. A delayed addition of it is done away with."""
        if self._closed:
            return
        self._due.pop(key, None)
        if key in self._taken:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._changed.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Queue the key after a delay, unless it is due earlier already."""
        if seconds <= 0:
            self.add(key)
            return
        due = self._clock() + seconds
        if self._closed or key in self._waiting or key in self._again or self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        self._order += 1
        heapq.heappush(self._delayed, (due, self._order, key))
        self._changed.set()

    def retry(self, key: K, at_least: float = 0.0) -> float:
        """Queue the key after a delay that doubles with every failure since `forget`. Returns the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = max(min(self._retry_first * 2.0 ** min(failures, 32), self._retry_longest), at_least)
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """The key's pass went well: its next failure starts from the shortest delay."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key and take it; `done` gives it back. Raises QueueClosedError after `close`."""
        while True:
            if self._closed:
                raise QueueClosedError
            self._collect_due()
            if self._ready:
                key = self._ready.popleft()
                self._waiting.discard(key)
                self._taken.add(key)
                if self._ready:
                    self._changed.set()
                return key
            self._changed.clear()
            try:
                async with asyncio.timeout(self._seconds_to_next()):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K) -> None:
        """The worker has finished with a key that it took."""
        self._taken.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        self._changed.set()

    def close(self) -> None:
        """Hand out nothing any more; workers waiting in `get` are woken."""
        self._closed = True
        self._changed.set()

    def _collect_due(self) -> None:
        now = self._clock()
        while self._delayed and self._delayed[0][0] <= now:
            due, _, key = heapq.heappop(self._delayed)
            if self._due.get(key) == due:
                self.add(key)

    def _seconds_to_next(self) -> float | None:
        while self._delayed and self._due.get(self._delayed[0][2]) != self._delayed[0][0]:
            heapq.heappop(self._delayed)
        return max(self._delayed[0][0] - self._clock(), 0.0) if self._delayed else None

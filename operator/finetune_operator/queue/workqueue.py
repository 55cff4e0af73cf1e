"""A queue of keys: no matter how often a key is added, it is queued only once, and two workers never have it at the same time.

Each key has a time by which it should be taken: when it was added, plus the patience of its urgency. The key with the earliest
such time comes first. So urgent keys overtake patient ones, yet no key waits forever: after the longest patience, no newly added
key can overtake it any more. A key that continues after a pass keeps the time when it was first added, so that begun work is
finished before later work starts.

A key that is added while a worker has it returns to the queue when that worker is done. If a key is added several times with
delays, the earliest time counts. Everything runs on one event loop; only `get` waits. Keys are kept in dictionaries that `get`
searches: with a thousand jobs, the design target, a search takes a fraction of the time of a pass.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
LONGEST_PATIENCE = 30.0


class QueueClosedError(Exception):
    """The queue is closed and returns no more keys, so the worker ends."""


class Urgency(Enum):
    """Why a key is added; the value is the key's patience in seconds."""

    NEW = 0.0
    """The user has not had any response about this job yet."""
    BEGUN = 2.0
    """The last pass over the key did something; the next pass continues it."""
    CHANGED = 4.0
    """Something about the key changed."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The entry of a key in the queue."""

    since: float
    """When the key was added; for a key that continues after a pass, when it was first added."""
    patience: float
    queued: float
    """When the key could first have been taken; the wait in the queue is measured from then."""

    @property
    def moment(self) -> float:
        return self.since + self.patience


class WorkQueue(Generic[K]):
    """A queue of keys without duplicates, with delays. `clock` returns monotonic seconds; by default it is the event loop's
    clock.

    `waited` is called for every key that is taken, with the number of seconds that the key waited after it was due.
    """

    def __init__(
        self,
        *,
        retry_first: float,
        retry_longest: float,
        clock: Callable[[], float] | None = None,
        waited: Callable[[float], None] | None = None,
    ) -> None:
        self._retry_first = retry_first
        self._retry_longest = retry_longest
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._waited = waited or (lambda _: None)
        self._ready: dict[K, _Entry] = {}
        self._taken: dict[K, _Entry] = {}
        self._again: dict[K, _Entry] = {}
        """Keys that were added while a worker had them."""
        self._delayed: dict[K, tuple[float, float]] = {}
        """Delayed key -> when it is due, and its patience once due: a key that has waited long can wait a little longer."""
        self._resting: dict[K, float] = {}
        """Key -> the time before which it cannot be taken, even if it is added again."""
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self._first_in_line = asyncio.Lock()
        """Lets only one waiting worker watch the queue: waking all of them for each key would cost more than most passes."""
        self._closed = False

    def __len__(self) -> int:
        """Number of keys that could be taken at once."""
        return len(self._ready)

    @property
    def num_delayed(self) -> int:
        """Number of keys that wait for their time."""
        return len(self._delayed)

    @property
    def num_taken(self) -> int:
        """Number of keys that workers are processing."""
        return len(self._taken)

    def add(self, key: K, urgency: Urgency = Urgency.CHANGED) -> None:
        """Queue the key now, instead of after a delay if it is already delayed."""
        now = self._clock()
        self._add(key, _Entry(now, urgency.value, now))

    def requeue_now(self, key: K) -> None:
        """Requeue a key that the caller has taken. It keeps the time when it was first added, so that begun work is finished."""
        taken, now = self._taken.get(key), self._clock()
        self._add(key, _Entry(now if taken is None else taken.since, Urgency.BEGUN.value, now))

    def add_after(self, key: K, seconds: float) -> None:
        """Queue the key after a delay, unless it is already due before that."""
        now = self._clock()
        if seconds <= 0:
            self._add(key, _Entry(now, 0.0, now))
        elif not self._closed and key not in self._ready and key not in self._again:
            self._delay(key, now + seconds, min(seconds, LONGEST_PATIENCE))

    def rest(self, key: K, seconds: float) -> None:
        """Let a key rest: even if it is added again, it cannot be taken until this number of seconds has passed."""
        until = self._clock() + seconds
        if seconds > 0 and not self._closed:
            self._resting[key] = max(until, self._resting.get(key, until))

    def retry(self, key: K, at_least: float = 0.0) -> float:
        """Queue the key after a delay that doubles with every failure since the last `forget`. Returns the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = max(min(self._retry_first * 2.0 ** min(failures, 32), self._retry_longest), at_least)
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """Record that the key's pass succeeded, which resets the delay of `retry`."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key and take it; the caller returns it with `done`. Raises QueueClosedError after `close`."""
        async with self._first_in_line:
            while True:
                if self._closed:
                    raise QueueClosedError
                self._collect_due()
                if self._ready:
                    key = min(self._ready, key=lambda key: self._ready[key].moment)
                    entry = self._taken[key] = self._ready.pop(key)
                    self._waited(max(self._clock() - entry.queued, 0.0))
                    return key
                self._changed.clear()
                try:
                    async with asyncio.timeout(self._seconds_to_next()):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def done(self, key: K) -> None:
        """Give back a key that the worker has finished with."""
        self._taken.pop(key, None)
        entry = self._again.pop(key, None)
        if entry is not None:
            self._add(key, entry)
        self._changed.set()

    def close(self) -> None:
        """Stop returning keys, and wake the workers that wait in `get`."""
        self._closed = True
        self._changed.set()

    def _add(self, key: K, entry: _Entry) -> None:
        if self._closed:
            return
        if key in self._taken:
            self._delayed.pop(key, None)
            known = self._again.get(key)
            if known is None or entry.moment < known.moment:
                self._again[key] = entry
            return
        rests_until = self._resting.get(key, 0.0)
        if rests_until > self._clock():
            self._delay(key, rests_until, entry.patience)
            return
        self._delayed.pop(key, None)
        known = self._ready.get(key)
        if known is None or entry.moment < known.moment:
            self._ready[key] = entry if known is None else _Entry(entry.since, entry.patience, known.queued)
            self._changed.set()

    def _delay(self, key: K, due: float, patience: float) -> None:
        """Queue the key at the time `due`, unless it is already due before that."""
        due = max(due, self._resting.get(key, due))
        known_due, known_patience = self._delayed.get(key, (math.inf, math.inf))
        if due < known_due:
            self._delayed[key] = due, patience
            self._changed.set()
        else:
            self._delayed[key] = known_due, min(patience, known_patience)

    def _collect_due(self) -> None:
        now = self._clock()
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        due_keys = [key for key, (due, _) in self._delayed.items() if due <= now]
        for key in sorted(due_keys, key=lambda key: self._delayed[key][0]):
            due, patience = self._delayed.pop(key)
            self._add(key, _Entry(due, patience, due))

    def _seconds_to_next(self) -> float | None:
        first = min((due for due, _ in self._delayed.values()), default=None)
        return None if first is None else max(first - self._clock(), 0.0)

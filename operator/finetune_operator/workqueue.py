"""A queue of keys: a key waits in it once however often it is added, and is never handed to two workers at a time.

Each key has a moment by which it should be taken, its addition plus the patience of its urgency, and the earliest moment comes
first. So urgent keys overtake patient ones, and yet none waits forever: a key that is added later than the longest patience
overtakes no other. A key that continues after a pass keeps the time of its first addition, so that work is finished before
later work is begun.

A key that is added while a worker has it comes back when that worker is done. Delayed additions keep the earliest time.
Everything runs on one event loop; no method but `get` waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from finetune_operator.keyed_heap import KeyedHeap

K = TypeVar("K", bound=Hashable)
LONGEST_PATIENCE = 30.0


class QueueClosedError(Exception):
    """The queue is closed and hands out nothing more, so the worker ends."""


class Urgency(Enum):
    """Why a key is added; the value is its patience in seconds."""

    NEW = 0.0
    """Its user has had no answer yet."""
    BEGUN = 2.0
    """Its last pass did something; the next one continues it."""
    CHANGED = 4.0
    """Something about it changed."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The entry of a key in the queue."""

    since: float
    """When it was added; for a key that continues, when it was added first."""
    patience: float
    queued: float
    """When it could have been taken first, for the measured time in the queue."""

    @property
    def moment(self) -> float:
        return self.since + self.patience


class WorkQueue(Generic[K]):
    """A queue of keys without duplicates, with delays. `clock`: monotonic seconds, the event loop's own unless a test gives
    another.

    `waited` is called for every key that is taken, with the seconds that it waited after its time had come.
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
        self._ready: KeyedHeap[K] = KeyedHeap()
        self._places: dict[K, _Entry] = {}
        """Entries of the keys in `_ready`."""
        self._taken: dict[K, _Entry] = {}
        self._again: dict[K, _Entry] = {}
        """Keys added while taken."""
        self._due: KeyedHeap[K] = KeyedHeap()
        """Delayed keys by the time at which they are due."""
        self._patience: dict[K, float] = {}
        """Patience of delayed keys: what waited long may wait a little longer."""
        self._resting: KeyedHeap[K] = KeyedHeap()
        """Keys that are not to be taken before a time, no matter who adds them."""
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self._first_in_line = asyncio.Lock()
        """Lets only one waiting worker look at the queue: waking all of them for each key would cost more than most passes."""
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

    @property
    def num_entries(self) -> int:
        """Entries in memory of any kind: a small multiple of the distinct keys, whatever was done with them."""
        heaps = self._ready.num_entries + self._due.num_entries + self._resting.num_entries
        return heaps + len(self._places) + len(self._patience) + len(self._taken) + len(self._again) + len(self._failures)

    def add(self, key: K, urgency: Urgency = Urgency.CHANGED) -> None:
        """Queue the key now. A delayed addition of it is dropped."""
        now = self._clock()
        self._add(key, _Entry(now, urgency.value, now))

    def requeue_now(self, key: K) -> None:
        """Queue a key again that the caller has taken. It keeps its first place, so that work that was begun comes to an end."""
        taken, now = self._taken.get(key), self._clock()
        self._add(key, _Entry(now if taken is None else taken.since, Urgency.BEGUN.value, now))

    def add_after(self, key: K, seconds: float) -> None:
        """Queue the key after a delay, unless it is due earlier already."""
        now = self._clock()
        if seconds <= 0:
            self._add(key, _Entry(now, 0.0, now))
        elif not self._closed and key not in self._ready and key not in self._again:
            self._delay(key, now + seconds, min(seconds, LONGEST_PATIENCE))

    def rest(self, key: K, seconds: float) -> None:
        """Let a key rest: whoever adds it, it is not taken before so many seconds have passed."""
        until = self._clock() + seconds
        if seconds > 0 and not self._closed:
            self._resting.put(key, max(until, self._resting.at(key) or until))

    def retry(self, key: K, at_least: float = 0.0) -> float:
        """Queue the key after a delay that doubles with every failure since `forget`. Returns the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = max(min(self._retry_first * 2.0 ** min(failures, 32), self._retry_longest), at_least)
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """Note that the key's pass went well: its next failure starts from the shortest delay."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key and take it; `done` gives it back. Raises QueueClosedError after `close`."""
        async with self._first_in_line:
            while True:
                if self._closed:
                    raise QueueClosedError
                self._collect_due()
                key = self._ready.pop()
                if key is not None:
                    place = self._places.pop(key)
                    self._taken[key] = place
                    self._waited(max(self._clock() - place.queued, 0.0))
                    return key
                self._changed.clear()
                try:
                    async with asyncio.timeout(self._seconds_to_next()):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def done(self, key: K) -> None:
        """Give back a key with which the worker has finished."""
        self._taken.pop(key, None)
        place = self._again.pop(key, None)
        if place is not None:
            self._add(key, place)
        self._changed.set()

    def close(self) -> None:
        """Hand out nothing any more; workers waiting in `get` are woken."""
        self._closed = True
        self._changed.set()

    def _add(self, key: K, place: _Entry) -> None:
        if self._closed:
            return
        if key in self._taken:
            self._due_no_more(key)
            known = self._again.get(key)
            if known is None or place.moment < known.moment:
                self._again[key] = place
            return
        rests_until = self._resting.at(key)
        if rests_until is not None and rests_until > self._clock():
            self._delay(key, rests_until, place.patience)
            return
        self._due_no_more(key)
        known = self._places.get(key)
        if known is None or place.moment < known.moment:
            self._places[key] = place if known is None else _Entry(place.since, place.patience, known.queued)
            self._ready.put(key, place.moment)
            self._changed.set()

    def _delay(self, key: K, due: float, patience: float) -> None:
        due = max(due, self._resting.at(key) or due)
        known = self._due.at(key)
        if known is None or due < known:
            self._due.put(key, due)
            self._patience[key] = patience
            self._changed.set()
        else:
            self._patience[key] = min(patience, self._patience[key])

    def _due_no_more(self, key: K) -> None:
        self._due.discard(key)
        self._patience.pop(key, None)

    def _collect_due(self) -> None:
        now = self._clock()
        while (rested := self._resting.first()) is not None and rested[0] <= now:
            self._resting.pop()
        while (first := self._due.first()) is not None and first[0] <= now:
            due, key = first
            patience = self._patience[key]
            self._due_no_more(key)
            self._add(key, _Entry(due, patience, due))

    def _seconds_to_next(self) -> float | None:
        first = self._due.first()
        return None if first is None else max(first[0] - self._clock(), 0.0)

"""Keys ordered by a number, where the number of a key may change and a key may be removed."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
SLACK = 64
"""Outdated entries that are not worth a compaction."""


class KeyedHeap(Generic[K]):
    """A heap in which changed and removed keys leave outdated entries, compacted as soon as these outnumber the current ones."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, K]] = []
        self._current: dict[K, tuple[float, int]] = {}
        """Place of each key; entries that say otherwise are outdated."""
        self._order = 0

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._current)

    def __contains__(self, key: K) -> bool:
        """Whether the key is present."""
        return key in self._current

    @property
    def num_entries(self) -> int:
        """Entries held in memory, outdated ones included."""
        return len(self._entries)

    def at(self, key: K) -> float | None:
        """Number of a key, or None if absent."""
        place = self._current.get(key)
        return None if place is None else place[0]

    def put(self, key: K, at: float) -> None:
        """Add a key, or change its number. Keys with equal numbers come out in the order of their additions."""
        self._order += 1
        self._current[key] = (at, self._order)
        heapq.heappush(self._entries, (at, self._order, key))
        self._compact()

    def discard(self, key: K) -> None:
        """Remove a key, if present."""
        if self._current.pop(key, None) is not None:
            self._compact()

    def first(self) -> tuple[float, K] | None:
        """The smallest number and its key, which stays; None if there is none."""
        while self._entries:
            at, order, key = self._entries[0]
            if self._current.get(key) == (at, order):
                return at, key
            heapq.heappop(self._entries)
        return None

    def pop(self) -> K | None:
        """Remove and return the key with the smallest number; None if there is none."""
        first = self.first()
        if first is None:
            return None
        heapq.heappop(self._entries)
        del self._current[first[1]]
        return first[1]

    def _compact(self) -> None:
        if len(self._entries) > 2 * len(self._current) + SLACK:
            self._entries = [(at, order, key) for key, (at, order) in self._current.items()]
            heapq.heapify(self._entries)

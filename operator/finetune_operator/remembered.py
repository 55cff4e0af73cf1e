"""Results that are asked for again and again, kept in bounded number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Makes each result once; the one that was not asked for longest is given up when there are too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        """Results held."""
        return len(self._results)

    def forget(self, key: K) -> None:
        """The result of that key does not hold any more."""
        self._results.pop(key, None)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The result of that key, made if it is not held. What `make` raises is not remembered."""
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        result = make()
        self._results[key] = result
        if len(self._results) > self._most:
            self._results.popitem(last=False)
        return result

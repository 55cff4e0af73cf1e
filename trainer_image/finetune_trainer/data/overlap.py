"""Records that occur more than once, token for token, and held-out ones that are trained on, too."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


MAX_COMPARED = 1 << 24
"""Documents of a source that are compared with each other: what bounds the memory, 128 MiB."""


class Repeated:
    """Digests of the documents of one source, to count those that occur more than once."""

    def __init__(self) -> None:
        self._blocks: list[Array] = []
        self._left = MAX_COMPARED

    def add(self, digests: Array) -> None:
        """Documents of the source, in any order. Those beyond MAX_COMPARED are not looked at."""
        kept = digests[: self._left]
        self._left -= len(kept)
        self._blocks.append(kept)

    def count(self) -> int:
        """How many documents equal an earlier one."""
        return sum(map(len, self._blocks)) - len(np.unique(np.concatenate(self._blocks))) if self._blocks else 0


class HeldOut:
    """Digests of the held-out documents, 8 bytes each. Two different documents share one with a probability of 1 in 1.8e19."""

    def __init__(self) -> None:
        self._blocks: list[Array] = []
        self._sorted: Array | None = None

    def add(self, digests: Array) -> None:
        """Documents that are held out. Call before `count`."""
        self._blocks.append(digests)

    def count(self, digests: Array) -> int:
        """How many of these training documents are held out too."""
        if self._sorted is None:
            self._sorted = np.unique(np.concatenate(self._blocks)) if self._blocks else np.empty(0, dtype="<u8")
        if not len(self._sorted):
            return 0
        places = np.minimum(np.searchsorted(self._sorted, digests), len(self._sorted) - 1)
        return int((self._sorted[places] == digests).sum())

"""Held-out records that are trained on too, token for token: they make the held-out loss look better than it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


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

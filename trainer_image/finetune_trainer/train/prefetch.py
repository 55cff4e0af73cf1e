"""The next batch is built while the current one is computed: one ahead, in the order of the steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

B = TypeVar("B")
Place = tuple[int, int]
"""Step and micro-step."""


class Prefetch(Generic[B]):
    """Batches by place. What is built depends on the place alone, so asking out of order costs time and nothing else."""

    def __init__(self, build: Callable[[int, int], B], micro_steps: int) -> None:
        """`build`: step and micro-step -> batch. `micro_steps`: of each step."""
        self._build, self._micro_steps = build, micro_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[Place, Future[B]] | None = None

    def take(self, step: int, micro_step: int) -> tuple[B, float]:
        """The batch, and the seconds that it was waited for. Raises what building it raised."""
        started = time.monotonic()
        batch = self._next[1].result() if self._next and self._next[0] == (step, micro_step) else self._build(step, micro_step)
        waited = time.monotonic() - started
        after = (step, micro_step + 1) if micro_step + 1 < self._micro_steps else (step + 1, 0)
        self._next = after, self._thread.submit(self._build, *after)
        return batch, waited

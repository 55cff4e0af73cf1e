"""The sequences of a rank in each micro-step. The next batch is built while the current one is processed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from finetune_trainer.data.permutation import position


def global_batch(step: int, global_batch_size: int, seed: int, num_sequences: int) -> list[int]:
    """Return the sequences of step `step` on all ranks together: the next ones in an endless series of shuffled epochs."""
    positions = range(step * global_batch_size, (step + 1) * global_batch_size)
    return [position(seed, number // num_sequences, number % num_sequences, num_sequences) for number in positions]


def micro_batch(sequences: list[int], micro_step: int, rank: int, world_size: int, micro_batch_size: int) -> list[int]:
    """Return the part of a global batch that rank `rank` processes in micro-step `micro_step`."""
    start = (micro_step * world_size + rank) * micro_batch_size
    return sequences[start : start + micro_batch_size]


B = TypeVar("B")
BatchPosition = tuple[int, int]
"""Step and micro-step."""


class Prefetch(Generic[B]):
    """Builds the next batch in advance. A batch depends only on its position, so taking batches out of order only costs time."""

    def __init__(self, build: Callable[[int, int], B], micro_steps: int) -> None:
        """build: step and micro-step -> batch. micro_steps: number of micro-steps in a step."""
        self._build, self._micro_steps = build, micro_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[BatchPosition, Future[B]] | None = None

    def take(self, step: int, micro_step: int) -> tuple[B, float]:
        """Return the batch and the seconds spent waiting for it. Raises what building the batch raised."""
        started = time.monotonic()
        batch = self._next[1].result() if self._next and self._next[0] == (step, micro_step) else self._build(step, micro_step)
        waited = time.monotonic() - started
        after = (step, micro_step + 1) if micro_step + 1 < self._micro_steps else (step + 1, 0)
        self._next = after, self._thread.submit(self._build, *after)
        return batch, waited

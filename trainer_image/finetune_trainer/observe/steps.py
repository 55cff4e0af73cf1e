"""Optimizer steps for reports: the result of one, and the pace of the latest."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """Result of one step."""

    loss: float
    """Mean over the supervised tokens of the global batch."""
    gradient_norm: float
    """Norm before clipping, over all ranks."""
    supervised_tokens: int
    tokens: int
    """Tokens of documents, without padding, over all ranks."""
    squared_document_lengths: int
    """Sum over all documents of length squared, over all ranks, which determines the work of attention."""
    data_seconds: float
    """Time that this rank waited for batches."""
    compute_seconds: tuple[float, ...]
    """Computing time of each rank, by rank. On a CPU it is the main thread's time without waiting, so that slow ranks show; on a
    GPU it is elapsed time without waiting for batches, which includes waiting for other ranks inside collectives.
    """
    stop: bool
    """Whether some rank has been asked to stop."""
    loss_scale: float
    """Factor of the loss with which the gradients were finite."""


WINDOW_STEPS = 100


@dataclass(frozen=True)
class StepTiming:
    """Timing of one optimizer step."""

    seconds: float
    data_seconds: float
    """Time that rank 0 waited for batches."""
    tokens: int
    """Tokens over all ranks."""
    flops: float | None
    """Operations by the model's mathematics, over all ranks."""


@dataclass(frozen=True)
class Pace:
    """Pace of the steps in a window."""

    tokens_per_second: float
    flops_per_second: float | None
    seconds_mean: float
    seconds_median: float
    seconds_p95: float
    data_wait_ratio: float


class PaceWindow:
    """The latest steps."""

    def __init__(self, size: int = WINDOW_STEPS) -> None:
        self._steps: deque[StepTiming] = deque(maxlen=size)

    def add(self, step: StepTiming) -> Pace:
        """Add a step; returns the pace with it."""
        self._steps.append(step)
        return pace(self._steps)

    @property
    def seconds_mean(self) -> float | None:
        """Mean duration of a step; None before the first."""
        return pace(self._steps).seconds_mean if self._steps else None


def pace(steps: Sequence[StepTiming]) -> Pace:
    """Pace of at least one step."""
    seconds = [step.seconds for step in steps]
    total = max(sum(seconds), 1e-9)
    flops = [step.flops for step in steps if step.flops is not None]
    return Pace(
        tokens_per_second=sum(step.tokens for step in steps) / total,
        flops_per_second=sum(flops) / total if len(flops) == len(seconds) else None,
        seconds_mean=total / len(seconds),
        seconds_median=statistics.median(seconds),
        seconds_p95=percentile(seconds, 0.95),
        data_wait_ratio=min(1.0, sum(step.data_seconds for step in steps) / total),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def straggler_ratio(compute_seconds: Sequence[float]) -> float | None:
    """Slowest rank over the median rank; None if nothing was measured."""
    if not compute_seconds:
        return None
    median = statistics.median(compute_seconds)
    return max(compute_seconds) / median if median > 0 else None

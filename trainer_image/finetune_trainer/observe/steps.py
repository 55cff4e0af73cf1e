"""Values to report about optimizer steps: the result of one step, and the pace of the latest steps."""

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
    """Mean loss over the supervised tokens of the global batch."""
    gradient_norm: float
    """Norm of the gradients before clipping, over all ranks."""
    supervised_tokens: int
    tokens: int
    """Tokens of documents, without padding, over all ranks."""
    squared_document_lengths: int
    """Sum of the squared lengths of all documents of all ranks, which determines the work of attention."""
    data_seconds: float
    """Time that this rank waited for batches."""
    compute_seconds: tuple[float, ...]
    """Computing time of each rank, by rank. On a CPU it is the main thread's processor time, so that slow ranks show. On a GPU it
    is elapsed time, excluding waits for batches but including waits for other ranks inside collectives.
    """
    stop: bool
    """Whether some rank has been asked to stop."""
    loss_scale: float
    """Loss scale at which the gradients were finite."""


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
    """Operations according to the model's mathematics, over all ranks; None if unknown."""


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
    """The latest steps, and their pace."""

    def __init__(self, size: int = WINDOW_STEPS) -> None:
        self._steps: deque[StepTiming] = deque(maxlen=size)
        self.seconds_mean: float | None = None
        """Mean duration of the latest steps; None before the first step."""

    def add(self, step: StepTiming) -> Pace:
        """Add a step, and return the pace including this step."""
        self._steps.append(step)
        seconds = [step.seconds for step in self._steps]
        total = max(sum(seconds), 1e-9)
        flops = [step.flops for step in self._steps if step.flops is not None]
        self.seconds_mean = total / len(seconds)
        return Pace(
            tokens_per_second=sum(step.tokens for step in self._steps) / total,
            flops_per_second=sum(flops) / total if len(flops) == len(seconds) else None,
            seconds_mean=self.seconds_mean,
            seconds_median=statistics.median(seconds),
            # The smallest value that at least 95 % of the values do not exceed.
            seconds_p95=sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1],
            data_wait_ratio=min(1.0, sum(step.data_seconds for step in self._steps) / total),
        )


def straggler_ratio(compute_seconds: Sequence[float]) -> float | None:
    """Return the ratio of the slowest rank's time to the median rank's; None if nothing was measured."""
    median = statistics.median(compute_seconds) if compute_seconds else 0.0
    return max(compute_seconds) / median if median > 0 else None

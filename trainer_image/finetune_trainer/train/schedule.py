"""Learning rate by step."""

from __future__ import annotations

import math

from finetune_job.api.training import Scheduler
from finetune_job.plan.run_plan import TrainingPlan

TIMESCALE_WITHOUT_WARMUP = 10_000
"""Time scale of InverseSqrt where no warm-up sets it: big_vision's and transformers' value."""


def total_steps(epochs: int | None, max_steps: int | None, num_sequences: int, global_batch_size: int) -> int:
    """Optimizer steps of a run. The last step of the last epoch is filled up from the next epoch's order."""
    if max_steps is not None:
        return max_steps
    return math.ceil((epochs or 0) * num_sequences / global_batch_size)


def warmup_steps(total: int, ratio: float) -> int:
    """Steps in which the rate rises; always fewer than all."""
    return min(_share(total, ratio), max(total - 1, 0))


def _share(total: int, ratio: float) -> int:
    """Whole steps, rounded up; 0.14 of 50 steps are 7, although the product of the two floats is a little more."""
    return math.ceil(total * ratio - 1e-9)


def learning_rate(step: int, total: int, training: TrainingPlan) -> float:
    """Rate of step `step`, counted from 0. Never 0 at the first step, so that each step teaches something.

    Warm-up: (step + 1) / warm-up steps, up to the peak. Then peak * (m + (1 - m) * `shape`), with m the least ratio. After the
    warm-up this is transformers' `get_scheduler`; in the warm-up it is one step ahead of it, because its first rate is 0.
    """
    warmup = warmup_steps(total, training.warmup_ratio)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    least = training.min_learning_rate_ratio
    return training.learning_rate * (least + (1 - least) * shape(step - warmup, total - warmup, warmup, training))


def shape(step: int, num_steps: int, warmup: int, training: TrainingPlan) -> float:
    """From 1 down to no less than 0, `step` of `num_steps` steps after the warm-up.

    With p = step / num_steps: constant 1; linear 1 - p; cosine (1 + cos(pi p)) / 2 (Loshchilov and Hutter, 2017, one period);
    inverse square root sqrt(t / (t + step)) with the time scale t = warm-up steps (Vaswani et al., 2017, section 5.3, as scaled by
    transformers); warm-up stable decay 1, and linear over the last steps (Hu et al., 2024, section 4).
    """
    match training.scheduler:
        case Scheduler.CONSTANT:
            return 1.0
        case Scheduler.LINEAR:
            return 1 - step / num_steps
        case Scheduler.COSINE:
            return (1 + math.cos(math.pi * step / num_steps)) / 2
        case Scheduler.INVERSE_SQRT:
            timescale = warmup or TIMESCALE_WITHOUT_WARMUP
            return math.sqrt(timescale / (timescale + step))
        case Scheduler.WARMUP_STABLE_DECAY:
            decay = min(_share(num_steps + warmup, training.decay_ratio), num_steps)
            return min(1.0, (num_steps - step) / decay) if decay else 1.0

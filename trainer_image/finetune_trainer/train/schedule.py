"""PURE. Learning rate by step."""

from __future__ import annotations

import math

from finetune_job.api.training import Scheduler


def total_steps(epochs: int | None, max_steps: int | None, num_sequences: int, global_batch_size: int) -> int:
    """Optimizer steps of a run. The last step of the last epoch is filled up from the next epoch's order."""
    if max_steps is not None:
        return max_steps
    return math.ceil((epochs or 0) * num_sequences / global_batch_size)


def warmup_steps(total: int, ratio: float) -> int:
    """Steps in which the rate rises; always fewer than all."""
    return min(math.ceil(total * ratio), max(total - 1, 0))


def learning_rate(step: int, total: int, peak: float, scheduler: Scheduler, warmup_ratio: float) -> float:
    """Rate of step `step`, counted from 0. Never 0 at the first step, so that each step teaches something.

    Warm-up: (step + 1) / warm-up steps. Then, with p the share of the remaining steps that is done: constant 1, linear 1 - p,
    cosine (1 + cos(pi p)) / 2 (Loshchilov and Hutter, 2017, one period).
    """
    warmup = warmup_steps(total, warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    if scheduler is Scheduler.LINEAR:
        return peak * (1 - done)
    if scheduler is Scheduler.COSINE:
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak

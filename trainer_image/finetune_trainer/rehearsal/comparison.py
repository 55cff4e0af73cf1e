"""Compares the histories and gradients of two runs, which may differ only by rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.model.dtypes import resolve_dtypes, torch_dtype

Gradients = Mapping[str, torch.Tensor]
COMPARED = ("loss", "gradient_norm")
NOISE_FACTOR = 8.0
"""Maximum distance between 16-bit gradients, as a multiple of the rounding error in one process. Summing in another order
gives different errors of the same kind, which can be several times as large.
"""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains."""

    loss: float
    """The bound for the loss of the first step, which both runs compute from the same weights and batches."""
    gradient: float
    """The bound for the first gradient: for its norm, and for each of its tensors (L2)."""
    later: float
    """The bound for later losses and norms. Adam divides by the gradient's size, so rounding reverses some small updates."""
    negligible: float
    """Lower bound of the divisor of a relative difference, as a share of the largest gradient."""
    steps: int
    """The number of steps whose gradients are compared. In the first step LoRA's A has no gradient, because B is zero."""


_FLOAT32 = Tolerance(loss=1e-4, gradient=5e-3, later=0.05, negligible=1e-4, steps=2)
"""The measured maximum is 2.1e-5 of a gradient in the first two steps, over 78 scaled-down models of 34 architectures."""
_SIXTEEN_BITS = Tolerance(loss=1e-2, gradient=0.08, later=0.25, negligible=0.05, steps=1)
"""The measured maximum is 0.017, in a case where the gradient of one process alone is 0.013 away from float32."""


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """Return the tolerance for runs that compute or reduce in `dtype`."""
    return _FLOAT32 if dtype.itemsize >= torch.float32.itemsize else _SIXTEEN_BITS


def coarsest_dtype(plan: RunPlan, stored: torch.dtype) -> torch.dtype:
    """Return the least precise type in which a run computes or reduces if its model is stored as `stored`."""
    dtypes = resolve_dtypes(plan, stored)
    taking_part = [dtype for dtype in (dtypes.load, dtypes.param, dtypes.reduce) if dtype is not None]
    if plan.method.quantization is not None and plan.method.quantization.compute_dtype is not None:
        taking_part.append(torch_dtype(plan.method.quantization.compute_dtype))
    return min(taking_part, key=lambda dtype: dtype.itemsize)


def differing_lines(
    on_ranks: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]], tolerance: Tolerance
) -> Iterator[str]:
    """Yield a sentence for each value that differs between the ranks and one process."""
    steps_on_ranks = {line["step"]: line for line in on_ranks}
    for line in alone:
        step = line["step"]
        if step == 0:
            continue
        if step not in steps_on_ranks:
            yield f"step {step} was done by one process and not by the ranks"
            continue
        other = steps_on_ranks[step]
        counted, expected = other.get("supervised_tokens"), line.get("supervised_tokens")
        if counted != expected:
            yield f"step {step} counts {counted} supervised tokens on ranks, {expected} in one process"
        for name in COMPARED:
            first = tolerance.loss if name == "loss" else tolerance.gradient
            allowed = first if step == 1 else tolerance.later
            a, b = float(other[name]), float(line[name])
            if not math.isclose(a, b, rel_tol=allowed, abs_tol=1e-12):
                yield f"step {step} has {name.replace('_', ' ')} {a:.6g} on ranks, {b:.6g} in one process"


def differing_gradients(
    on_ranks: Gradients, alone: Gradients, tolerance: Tolerance, exact: Gradients | None = None
) -> Iterator[str]:
    """Yield a sentence for each tensor whose gradient differs between the ranks and one process.

    `exact`: gradients of one process in float32. Their distance from `alone` shows how rounding affects each tensor.
    """
    if set(on_ranks) != set(alone):
        yield f"ranks train {len(on_ranks)} tensors, one process {len(alone)}"
        return
    largest = max((float(tensor.norm()) for tensor in alone.values()), default=0.0)
    for name, tensor in alone.items():
        size, distance = float(tensor.norm()), float((on_ranks[name] - tensor).norm())
        rounding = 0.0 if exact is None or name not in exact else NOISE_FACTOR * float((exact[name] - tensor).norm())
        if not distance <= max(tolerance.gradient * max(size, tolerance.negligible * largest), rounding):
            yield f"the gradient of {name} is {distance / max(size, 1e-30):.2g} of its size away from that of one process"

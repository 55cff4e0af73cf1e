"""Are two histories and their gradients the same run, but for rounding?"""

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
"""How much farther than one process's own rounding a 16-bit gradient may be: another order of sums is another draw of the same
errors, and their tails are long."""


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding explains, as shares."""

    loss: float
    """Of the first step's loss; the same weights and batches gave it."""
    gradient: float
    """Of the first gradient: its norm, and each tensor of it (L2)."""
    later: float
    """Of losses and norms afterwards. Adam divides by the gradient's size, so rounding turns some small updates around."""
    negligible: float
    """A tensor with less than this share of the largest one's gradient is measured against that."""
    steps: int
    """Whose gradients are compared. That of LoRA's A is zero in the first, because B is."""


_FLOAT32 = Tolerance(loss=1e-4, gradient=5e-3, later=0.05, negligible=1e-4, steps=2)
"""Measured over 78 scaled-down models of 34 architectures: at most 2.1e-5 of a gradient, in the first two steps."""
_SIXTEEN_BITS = Tolerance(loss=1e-2, gradient=0.08, later=0.25, negligible=0.05, steps=1)
"""Measured: at most 0.017 where the same gradient of one process is itself 0.013 away from float32."""


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """For runs that compute, or reduce, in `dtype`."""
    return _FLOAT32 if dtype.itemsize >= torch.float32.itemsize else _SIXTEEN_BITS


def coarsest_dtype(plan: RunPlan, stored: torch.dtype) -> torch.dtype:
    """The coarsest type in which a run on a model stored as `stored` computes or reduces."""
    dtypes = resolve_dtypes(plan, stored)
    taking_part = [dtype for dtype in (dtypes.load, dtypes.param, dtypes.reduce) if dtype is not None]
    if plan.method.quantization is not None and plan.method.quantization.compute_dtype is not None:
        taking_part.append(torch_dtype(plan.method.quantization.compute_dtype))
    return min(taking_part, key=lambda dtype: dtype.itemsize)


def differing_lines(
    found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]], tolerance: Tolerance
) -> Iterator[str]:
    """A sentence per value that is not that of one process."""
    found_steps = {line["step"]: line for line in found}
    for line in wanted:
        step = line["step"]
        if step == 0:
            continue
        if step not in found_steps:
            yield f"step {step} was done by one process and not by the ranks"
            continue
        other = found_steps[step]
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
    found: Gradients, wanted: Gradients, tolerance: Tolerance, exact: Gradients | None = None
) -> Iterator[str]:
    """A sentence per tensor that is not that of one process.

    `exact`: that of one process in float32, whose distance from `wanted` says what rounding does to this tensor of this model.
    """
    if set(found) != set(wanted):
        yield f"ranks train {len(found)} tensors, one process {len(wanted)}"
        return
    largest = max((float(tensor.norm()) for tensor in wanted.values()), default=0.0)
    for name, tensor in wanted.items():
        size, distance = float(tensor.norm()), float((found[name] - tensor).norm())
        rounding = 0.0 if exact is None or name not in exact else NOISE_FACTOR * float((exact[name] - tensor).norm())
        if not distance <= max(tolerance.gradient * max(size, tolerance.negligible * largest), rounding):
            yield f"the gradient of {name} is {distance / max(size, 1e-30):.2g} of its size away from that of one process"

"""PURE. Are two histories the same run, but for rounding?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


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


_FLOAT32 = Tolerance(loss=1e-4, gradient=5e-3, later=0.05, negligible=1e-4)
_SIXTEEN_BITS = Tolerance(loss=1e-2, gradient=0.08, later=0.25, negligible=0.05)
COMPARED = ("loss", "gradient_norm")


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """For runs that compute, or reduce, in `dtype`."""
    return _FLOAT32 if dtype.itemsize >= torch.float32.itemsize else _SIXTEEN_BITS


def differing_lines(found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]], tolerance: Tolerance) -> Iterator[str]:
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

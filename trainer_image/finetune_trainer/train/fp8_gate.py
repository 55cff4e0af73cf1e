"""Whether products in FP8 teach what products in bfloat16 teach: asked once, of the first batch, before the first step.

In: the model with FP8, the batch of step 0. Out: how far the loss is off and how much the gradients point the same way.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.fp8_products import FP8_FIELD, without_fp8
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train.step import StepInputs, compute_gradients, local_gradients

log = logging.getLogger(__name__)

MOST_LOSS_DIFFERENCE = 0.01
"""Relative. Random models of 2 to 32 layers have up to 0.0005, and 0.005 with weights three times as large."""
LEAST_COSINE = 0.95
"""Between the gradients of all that is trained. The same models have 0.991 and more; with weights three times as large, which
make small differences grow from layer to layer, 0.81 to 0.986."""


@dataclass(frozen=True)
class Fp8Figures:
    """FP8 next to bfloat16 on the first batch."""

    loss_difference: float
    """Relative; 0 if neither loses anything, as where the batch has nothing that is learnt."""
    cosine: float
    """Of the angle between the gradients; NaN if one alone has no length, 1 if neither has, as where nothing is learnt yet."""

    @property
    def passes(self) -> bool:
        """A figure that is not a number passes nothing."""
        return abs(self.loss_difference) <= MOST_LOSS_DIFFERENCE and self.cosine >= LEAST_COSINE


def check_fp8(inputs: StepInputs) -> Fp8Figures:
    """Raises ConfigError on all ranks alike if FP8 does not pass. Called by all ranks together; no gradients are left."""
    model, batches = inputs.model, inputs.batches
    terms = inputs.objective.num_terms(batches.data, batches.sequences(0))
    losses, gradients = [], []
    # What is compiled for the run is compiled with FP8 alone.
    with torch.compiler.set_stance("force_eager"):
        for in_fp8 in (False, True):
            with nullcontext() if in_fp8 else without_fp8(model):
                done = compute_gradients(inputs, step=0, weight=1 / max(terms, 1))
            losses.append(done.losses.sum())
            gradients.append([gradient.float().clone() for gradient in local_gradients(model)])
            model.zero_grad(set_to_none=True)
    figures = _compared(losses, gradients, inputs.gang)
    told = f"the loss of the first batch differs by {figures.loss_difference:+.2%}, the gradients' cosine is {figures.cosine:.4f}"
    if not figures.passes:
        raise ConfigError(
            f"{FP8_FIELD}: {told}; allowed are {MOST_LOSS_DIFFERENCE:.0%} and at least {LEAST_COSINE}", f"set {FP8_FIELD}: false"
        )
    log.info("FP8 next to bfloat16: %s", told)
    return figures


def _compared(losses: list[torch.Tensor], gradients: list[list[torch.Tensor]], gang: Gang) -> Fp8Figures:
    """Over all ranks, each of which has a part of both."""
    wide, narrow = gradients
    together = [_dot(wide, narrow), _dot(wide, wide), _dot(narrow, narrow)]
    loss, loss_in_fp8, dot, squares, squares_in_fp8 = gang.sum([*(float(each) for each in losses), *together])
    if squares == squares_in_fp8 == 0:
        cosine = 1.0
    else:
        length = math.sqrt(max(squares * squares_in_fp8, 0.0))
        cosine = dot / length if length else math.nan
    difference = loss_in_fp8 - loss
    if difference:
        difference = difference / loss if loss else math.nan
    return Fp8Figures(loss_difference=difference, cosine=cosine)


def _dot(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(first, second, strict=True))

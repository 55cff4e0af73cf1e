"""Computes figures that compare the logits of models: differences, divergences, and agreement on the most likely token.

Input: files of logits, prompt by prompt. Output: LogitFigures. This module knows nothing about models; logits.py calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from finetune_trainer.processes.torch_threads import map_in_threads
from finetune_trainer.verify.gate import TIE_UNITS, UNIT_ROUNDOFF, LogitFigures, judged_share
from finetune_trainer.weights.rounding import dtype_name

VALUES_AT_ONCE = 1 << 17
"""Number of logits that a thread holds in fp64 at a time, in several copies: few enough for a processor's cache."""


@dataclass(frozen=True)
class LogitsFile:
    """A file of logits of shape (positions, vocabulary)."""

    file: Path
    num_positions: int
    dtype: torch.dtype

    @property
    def vocabulary(self) -> int:
        return self.file.stat().st_size // self.dtype.itemsize // self.num_positions

    def positions(self, first: int, last: int) -> torch.Tensor:
        """Read the logits from position `first` up to `last`, in fp32: (last - first, vocabulary)."""
        size = self.vocabulary * self.dtype.itemsize
        raw = np.fromfile(self.file, dtype=np.uint8, count=(last - first) * size, offset=first * size)
        return torch.from_numpy(raw).view(self.dtype).view(last - first, -1).float()


@dataclass(frozen=True)
class PromptFigures:
    """Figures of one prompt, of shape (positions,). divergences: KL(reference || merged). effects: KL(reference || base)."""

    differences: torch.Tensor
    """Largest difference between logits of reference and merged model, at each position."""
    largest: torch.Tensor
    """Largest absolute logit of the reference, at each position."""
    divergences: torch.Tensor
    effects: torch.Tensor
    agrees: torch.Tensor


def figures_of_prompts(prompts: Sequence[tuple[LogitsFile, LogitsFile, LogitsFile]]) -> list[PromptFigures]:
    """Return the figures of each prompt. prompts: for each prompt, the logits of reference, base and merged model."""
    return map_in_threads(_figures_of_prompt, prompts)


def _figures_of_prompt(files: tuple[LogitsFile, LogitsFile, LogitsFile]) -> PromptFigures:
    """files: logits of reference, base and merged model. If vocabulary sizes differ, figures are NaN, which passes no gate."""
    reference, base, merged = files
    tolerance = TIE_UNITS * max(UNIT_ROUNDOFF[dtype_name(logits.dtype)] for logits in (reference, merged))
    if reference.vocabulary != merged.vocabulary:
        unknown = torch.full((reference.num_positions,), torch.nan)
        return PromptFigures(unknown, torch.zeros_like(unknown), unknown, unknown, torch.zeros_like(unknown, dtype=torch.bool))
    blocks = []
    step = max(1, VALUES_AT_ONCE // reference.vocabulary)
    for first in range(0, reference.num_positions, step):
        last = min(first + step, reference.num_positions)
        expected, result = reference.positions(first, last), merged.positions(first, last)
        differences, largest = (expected - result).abs().max(dim=1).values, expected.abs().max(dim=1).values
        chosen = expected.gather(1, result.argmax(dim=1, keepdim=True)).squeeze(1)
        agrees = expected.max(dim=1).values - chosen <= tolerance * largest
        blocks.append((differences, largest, *_kl(expected, result, base.positions(first, last)), agrees))
    return PromptFigures(*(torch.cat(values) for values in zip(*blocks, strict=True)))


def figures_together(prompts: Sequence[PromptFigures], *, chooses_experts: bool) -> LogitFigures:
    """Combine the figures of all prompts; there must be at least one prompt."""
    share = judged_share(chooses_experts=chooses_experts)
    # torch's maximum keeps a NaN at any position; Python's drops a NaN that comes second.
    differences = torch.cat([prompt.differences for prompt in prompts])
    agrees = torch.cat([prompt.agrees for prompt in prompts])
    return LogitFigures(
        num_prompts=len(prompts),
        num_positions=len(differences),
        max_abs_difference=float(differences.max()),
        usual_abs_difference=float(differences.quantile(share, interpolation="higher")),
        max_abs_logit=float(torch.cat([prompt.largest for prompt in prompts]).max()),
        mean_kl=mean_of_least(torch.cat([prompt.divergences for prompt in prompts]), share),
        effect_mean_kl=mean_of_least(torch.cat([prompt.effects for prompt in prompts]), share),
        top1_agreement=float(agrees.sum()) / len(agrees),
        chooses_experts=chooses_experts,
    )


def _kl(reference: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Return KL(reference || other) at each position, in nats, for each of `others`, from logits (positions, vocabulary)."""
    first = reference.double()
    total = first.logsumexp(dim=1, keepdim=True)
    probabilities = (first - total).exp_()
    divergences = []
    for other in others:
        second = other.double()
        total_of_second = second.logsumexp(dim=1)
        # A token that both models rule out has the logit -inf in both, and adds nothing.
        terms = torch.sub(first, second, out=second).masked_fill_(first.isneginf() & other.isneginf(), 0.0).mul_(probabilities)
        divergences.append(terms.sum(dim=1) - total.squeeze(1) + total_of_second)
    return divergences


def mean_of_least(values: torch.Tensor, share: float) -> float:
    """Return the mean of the smallest values that make up this share of all values; NaN if any value is NaN."""
    if values.isnan().any():
        return math.nan
    return float(values.sort().values[: math.ceil(share * len(values))].mean())

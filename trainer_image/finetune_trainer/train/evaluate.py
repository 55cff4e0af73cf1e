"""Loss on the held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from finetune_trainer.model.objective import Objective, Split
from finetune_trainer.ranks.gang import Gang


def held_out_loss(
    model: nn.Module,
    objective: Objective[Any, Any],
    data: Split[Any],
    micro_batch_size: int,
    *,
    gang: Gang,
    autocast: torch.dtype | None,
    after_batch: Callable[[], None] = lambda: None,
) -> float:
    """Mean over all held-out terms; the model is left in training mode. Called by all ranks together."""
    rounds = math.ceil(data.num_sequences / (micro_batch_size * gang.world_size))
    terms = objective.num_terms(data, range(data.num_sequences))
    local = torch.zeros((), dtype=torch.float64, device=gang.device)
    with _evaluation_mode(model), torch.no_grad():
        for number in range(rounds):
            first = (number * gang.world_size + gang.rank) * micro_batch_size
            sequences = list(range(first, min(first + micro_batch_size, data.num_sequences)))
            # A rank without sequences computes one all the same, because gathering parameters takes all ranks.
            loss = objective.weighted_loss(model, data.batch(sequences or [0]), 1.0, gang.device, autocast)
            if sequences:
                local += loss
            after_batch()
    (total,) = gang.sum([float(local)])
    return total / max(terms, 1)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()

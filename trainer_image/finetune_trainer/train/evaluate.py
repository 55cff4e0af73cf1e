"""Loss on the held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.gang import Gang
from finetune_trainer.train.loss import summed_loss

QUANTISED_LAYERS = ("Linear4bit", "Linear8bitLt")
"""These stay in training mode: on CPU a forward pass in evaluation mode repacks 4-bit weights, which then train wrong."""


def held_out_loss(model: nn.Module, data: PreparedSplit, micro_batch_size: int, gang: Gang, autocast: torch.dtype | None) -> float:
    """Mean over all supervised held-out tokens; the model is left in training mode. Called by all ranks together."""
    rounds = math.ceil(data.num_sequences / (micro_batch_size * gang.world_size))
    local = 0.0
    with _evaluation_mode(model), torch.no_grad():
        for number in range(rounds):
            first = (number * gang.world_size + gang.rank) * micro_batch_size
            sequences = list(range(first, min(first + micro_batch_size, data.num_sequences)))
            # A rank without sequences computes one all the same, because gathering parameters takes all ranks.
            loss = summed_loss(model, data.batch(sequences or [0]), gang.device, autocast)
            local += float(loss) if sequences else 0.0
    (total,) = gang.sum([local])
    return total / max(data.num_supervised_tokens, 1)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    for module in model.modules():
        if type(module).__name__ in QUANTISED_LAYERS:
            module.train()
    try:
        yield
    finally:
        model.train()

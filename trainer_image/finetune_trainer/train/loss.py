"""Cross-entropy summed over supervised tokens, so that any split of a global batch adds up to the same loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from finetune_trainer.data.batches import IGNORED_LABEL, Batch

TOKENS_PER_PART = 1024
"""Positions whose logits are held in float32 at a time: 0.5 GB with a vocabulary of 128,000, and twice that in backward."""


def summed_loss(model: nn.Module, batch: Batch, device: torch.device, autocast: torch.dtype | None) -> torch.Tensor:
    """Sum of the cross-entropy over the supervised tokens of `batch`, float32, on `device`.

    The model gets no attention mask: positions that start again at 0 keep documents apart.
    """
    context: AbstractContextManager[object] = torch.autocast(device.type, dtype=autocast) if autocast else nullcontext()
    with context:
        logits = model(input_ids=batch.input_ids.to(device), position_ids=batch.position_ids.to(device), use_cache=False).logits
    return summed_cross_entropy(logits, batch.labels.to(device))


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over supervised positions of -log p(label), in float32. `logits` [B, T, V], `labels` [B, T] not shifted.

    The float32 copy of the logits exists only for a part of the positions at a time and is made again in backward.
    """
    logits, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    supervised = targets != IGNORED_LABEL
    logits, targets = logits[supervised], targets[supervised]
    # With no supervised token the sum is empty, but it must still depend on the logits, or FSDP's backward hooks never run.
    total = logits[:0].float().sum()
    for start in range(0, len(targets), TOKENS_PER_PART):
        part = slice(start, start + TOKENS_PER_PART)
        if torch.is_grad_enabled():
            added = checkpoint(_part, logits[part], targets[part], use_reentrant=False, preserve_rng_state=False)
        else:
            added = _part(logits[part], targets[part])
        total = added if start == 0 else total + added
    return total


def _part(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="sum")

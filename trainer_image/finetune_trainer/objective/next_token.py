"""Supervised next-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from finetune_trainer.data.batches import IGNORED_LABEL, Batch, PreparedSplit, to_device
from finetune_trainer.errors import InvariantError
from finetune_trainer.model import packed_documents, variable_length
from finetune_trainer.model.objective import BatchSize
from finetune_trainer.objective import head
from finetune_trainer.objective.cross_entropy import Targets, cross_entropy_of


class NextToken:
    """Cross-entropy over the supervised tokens: an `Objective[PreparedSplit, Batch]`."""

    def install(self, model: nn.Module) -> None:
        """Let the output layer compute the loss, so that all logits are never in memory at once, and keep documents apart."""
        head.install(model)
        packed_documents.install_document_masks(model)
        packed_documents.install_rope_by_document(model)
        packed_documents.leave_padding_unchecked(model)

    def num_terms(self, data: PreparedSplit, sequences: Sequence[int]) -> int:
        """Return the number of supervised tokens in these sequences."""
        return data.supervised_tokens(sequences)

    def size(self, batch: Batch) -> BatchSize:
        """Return the total length, and the sum of squared lengths, of the batch's documents."""
        return BatchSize(sum(batch.document_lengths), sum(length * length for length in batch.document_lengths))

    def weighted_loss(
        self, model: nn.Module, batch: Batch, weight: float, device: torch.device, autocast: torch.dtype | None
    ) -> torch.Tensor:
        """Return `weight` times the summed cross-entropy.

        The model gets no attention mask. Documents are separated by positions, which restart at 0, or by their bounds.
        """
        targets = targets_of(batch.labels, weight, device)
        context: AbstractContextManager[object] = torch.autocast(device.type, dtype=autocast) if autocast else nullcontext()
        positions = to_device(batch.position_ids, device)
        bounds = variable_length.document_bounds(batch.position_ids, device) if variable_length.is_installed(model) else {}
        with context, packed_documents.documents_apart(positions), head.scored(targets) as scoring:
            output = model(input_ids=to_device(batch.input_ids, device), position_ids=positions, use_cache=False, **bounds).logits
        loss = scoring.loss
        if loss is None:
            rows = output.flatten(0, -2).index_select(0, targets.rows)
            return cross_entropy_of(rows, lambda logits: logits, targets)
        is_output_of_head = output is loss
        if not is_output_of_head:
            raise InvariantError("the model changed the result of its output layer, so the loss is not that of its logits")
        return loss


def targets_of(labels: torch.Tensor, weight: float, device: torch.device) -> Targets:
    """Return the targets for `labels` [B, T], which are not shifted, and on the CPU, so that searching waits for no device."""
    num_rows, length = labels.shape
    following = torch.full((num_rows, length), IGNORED_LABEL, dtype=labels.dtype)
    following[:, :-1] = labels[:, 1:]
    following = following.flatten()
    rows = (following != IGNORED_LABEL).nonzero().flatten()
    return Targets(to_device(rows, device), to_device(following[rows], device), weight)

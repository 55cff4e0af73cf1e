"""Does a document in a packed sequence see the one before it? Computed on a small model of the same architecture.

Positions that start again keep documents apart where masks are made from them (model/document_masks.py); not all code makes its
masks so, and none of it says what it does. Called by small_model.py.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from finetune_job.catalogue.book import make_finding
from finetune_job.rules.rule import Finding
from finetune_trainer.model import document_masks

FIRST, SECOND = 9, 7
"""Tokens of the two documents."""
TOLERANCE = 1e-4
"""Largest difference of a logit, in float32. Leaks were measured from 0.01 up, and other order of sums below 1e-6."""


def leak_finding(model: PreTrainedModel) -> Finding | None:
    """A finding where logits of a document depend on the document before it. `model`: of small_model.py."""
    leak = leak_of(model)
    if leak <= TOLERANCE:
        return None
    return make_finding(
        "packing-leaks",
        field="spec.data.packing",
        value="true",
        message=f"{type(model).__name__} does not keep packed documents apart: logits of one change by {leak:.2g} with the one "
        "before it in the sequence (measured on a small model of this architecture)",
        fix="set spec.data.packing: false",
        changes={"spec.data.packing": False},
    )


def leak_of(model: PreTrainedModel) -> float:
    """Largest difference between the logits of a document alone and of the same one after another in one sequence."""
    document_masks.install(model)
    model.eval()
    size = int(model.get_input_embeddings().weight.shape[0])
    first, second = torch.arange(FIRST) % size, (torch.arange(SECOND) * 3 + 1) % size
    with torch.no_grad():
        alone = _logits(model, second)
        packed = _logits(model, first, second)[FIRST:]
    return float((packed - alone).abs().max() / alone.abs().max().clamp(min=1))


def _logits(model: PreTrainedModel, *documents: torch.Tensor) -> torch.Tensor:
    """(tokens, vocabulary), as the trainer asks for them: no mask, positions that start again."""
    positions = torch.cat([torch.arange(len(each)) for each in documents])
    with document_masks.documents_apart(positions[None]):
        logits: torch.Tensor = model(input_ids=torch.cat(documents)[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits.float()

"""Runs a small model of the same architecture to test the model's code, for instance whether packed documents see each other.

Positions that start again separate documents if masks are made from them (model/packed_documents.py); not all code makes its
masks this way, and none of it declares what it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.model import packed_documents
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.task import causality_finding

log = logging.getLogger(__name__)
FIRST, SECOND = 9, 7
"""Tokens of the two documents."""
LEAK_TOLERANCE = 1e-4
"""Largest difference of a logit, in float32. Leaks were measured from 0.01 up, another order of sums below 1e-6."""


def check_small_model(seen: ModelInspection) -> list[Finding]:
    """Returns the findings; none if the model's code fails, which the rehearsal reports. Changes the model's weights."""
    if seen.observed is None:
        return []
    plan, model = seen.plan, seen.observed.model
    spread(model)
    checks: list[Callable[[PreTrainedModel], Finding | None]] = [causality_finding]
    if plan.data.packing:
        checks.append(packing_leak_finding)
    findings = [_tried(check, model) for check in checks]
    return [finding for finding in findings if finding is not None]


def _tried(check: Callable[[PreTrainedModel], Finding | None], model: PreTrainedModel) -> Finding | None:
    try:
        return check(model)
    except Exception as error:  # noqa: BLE001 - code of any model
        log.warning("%s fails on a small model of this architecture: %s: %s", check.__name__, type(error).__name__, error)
        return None


@torch.no_grad()
def spread(model: PreTrainedModel) -> None:
    """Gives each matrix a size at which products keep their scale: with fresh, small weights attention hardly counts."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            scale = parameter.std() * parameter.shape[-1] ** 0.5
            parameter.div_(scale.clamp(min=1e-6))


def packing_leak_finding(model: PreTrainedModel) -> Finding | None:
    """Returns a finding if logits of a document depend on the document before it. `model`: a small one with random weights."""
    leak = packing_leak(model)
    if leak <= LEAK_TOLERANCE:
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


def packing_leak(model: PreTrainedModel) -> float:
    """Returns the largest difference between the logits of a document alone and after another one in the same sequence."""
    packed_documents.install_document_masks(model)
    model.eval()
    size = int(model.get_input_embeddings().weight.shape[0])
    first, second = torch.arange(FIRST) % size, (torch.arange(SECOND) * 3 + 1) % size
    with torch.no_grad():
        alone = _logits(model, second)
        packed = _logits(model, first, second)[FIRST:]
    return float((packed - alone).abs().max() / alone.abs().max().clamp(min=1))


def _logits(model: PreTrainedModel, *documents: torch.Tensor) -> torch.Tensor:
    """Returns logits (tokens, vocabulary) as the trainer computes them: without a mask, with positions that start again."""
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    with packed_documents.documents_apart(positions[None]):
        logits: torch.Tensor = model(input_ids=torch.cat(documents)[None], position_ids=positions[None], use_cache=False).logits[
            0
        ]
    return logits.float()

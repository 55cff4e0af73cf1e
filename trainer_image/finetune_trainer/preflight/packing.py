"""Does a document in a packed sequence see the one before it? Computed on a small model of the same architecture.

Positions that start again keep documents apart where the model's code builds its mask from them; not all code does, and none of it
says so. Called by model_process.py.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel

from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.model.load import load_config
from finetune_trainer.rehearsal.twin import search

log = logging.getLogger(__name__)
FIRST, SECOND = 9, 7
"""Tokens of the two documents."""
TOLERANCE = 1e-4
"""Largest difference of a logit, in float32. Leaks were measured from 0.01 up, and other order of sums below 1e-6."""


def check_packing(plan: RunPlan, directory: Path) -> Finding | None:
    """A finding where logits of a document depend on the document before it. None, too, where no small model can be built."""
    if not plan.data.packing:
        return None
    config = load_config(plan, directory)
    try:
        _, model = search(plan, config, config.to_dict())
        leak = leak_of(model)
    except Exception as error:  # noqa: BLE001 - code of any model; the rehearsal says what fails in it
        log.warning("not checked whether packed documents stay apart: %s: %s", type(error).__name__, error)
        return None
    if leak <= TOLERANCE:
        return None
    return Finding(
        rule="packing-leaks",
        severity="error",
        field="spec.data.packing",
        value="true",
        message=f"{type(model).__name__} does not keep packed documents apart: logits of one change by {leak:.2g} with the one "
        "before it in the sequence (measured on a small model of this architecture)",
        fix="set spec.data.packing: false",
    )


def leak_of(model: PreTrainedModel) -> float:
    """Largest difference between the logits of a document alone and of the same one after another in one sequence."""
    model.eval()
    size = int(model.get_input_embeddings().weight.shape[0])
    first, second = torch.arange(FIRST) % size, (torch.arange(SECOND) * 3 + 1) % size
    with torch.no_grad():
        _spread(model)
        alone = _logits(model, second)
        packed = _logits(model, first, second)[FIRST:]
    return float((packed - alone).abs().max() / alone.abs().max().clamp(min=1))


def _logits(model: PreTrainedModel, *documents: torch.Tensor) -> torch.Tensor:
    """(tokens, vocabulary), as the trainer asks for them: no mask, positions that start again."""
    positions = torch.cat([torch.arange(len(each)) for each in documents])
    logits: torch.Tensor = model(input_ids=torch.cat(documents)[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits.float()


def _spread(model: PreTrainedModel) -> None:
    """Fresh weights are so small that attention hardly counts: give each matrix the size at which products keep their scale."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            scale = parameter.std() * parameter.shape[-1] ** 0.5
            parameter.div_(scale.clamp(min=1e-6))

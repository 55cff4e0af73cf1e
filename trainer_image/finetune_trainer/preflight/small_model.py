"""What the logits show of a model's code, on a small model of the same architecture with random weights.

For a model whose structure is sound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from finetune_job.rules.rule import Finding
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.packing import leak_finding
from finetune_trainer.preflight.task import causality_finding

log = logging.getLogger(__name__)


def check_small_model(seen: ModelInspection) -> list[Finding]:
    """What is found; nothing where the code of the model fails, of which the rehearsal says why. Changes the model's weights."""
    if seen.observed is None:
        return []
    plan, model = seen.plan, seen.observed.model
    _spread(model)
    checks: list[Callable[[PreTrainedModel], Finding | None]] = [causality_finding]
    if plan.data.packing:
        checks.append(leak_finding)
    found = [_tried(check, model) for check in checks]
    return [finding for finding in found if finding is not None]


def _tried(check: Callable[[PreTrainedModel], Finding | None], model: PreTrainedModel) -> Finding | None:
    try:
        return check(model)
    except Exception as error:  # noqa: BLE001 - code of any model
        log.warning("%s fails on a small model of this architecture: %s: %s", check.__name__, type(error).__name__, error)
        return None


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    """Fresh weights are so small that attention hardly counts: give each matrix the size at which products keep their scale."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            scale = parameter.std() * parameter.shape[-1] ** 0.5
            parameter.div_(scale.clamp(min=1e-6))

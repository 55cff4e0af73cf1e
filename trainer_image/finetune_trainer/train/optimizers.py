"""AdamW over the trainable parameters."""

from __future__ import annotations

import torch
from torch import nn

from finetune_job.plan.run_plan import TrainingPlan
from finetune_trainer.checkpoint.state import create_moments

BETAS = (0.9, 0.999)
EPSILON = 1e-8


def adamw(model: nn.Module, training: TrainingPlan) -> torch.optim.Optimizer:
    """An optimizer that already has its (zero) moments. Call after sharding."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=training.learning_rate, betas=BETAS, eps=EPSILON, weight_decay=training.weight_decay
    )
    create_moments(optimizer)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate

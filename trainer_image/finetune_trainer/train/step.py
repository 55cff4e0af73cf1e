"""One optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune_job.plan.run_plan import TrainingPlan
from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.errors import NonFiniteError
from finetune_trainer.gang import Gang
from finetune_trainer.train.batches import global_batch, micro_batch
from finetune_trainer.train.loss import summed_loss
from finetune_trainer.train.optimizers import set_learning_rate
from finetune_trainer.train.randomness import seed_forward_pass

NON_FINITE_HINT = "lower learningRate, raise warmupRatio, or look at the records of this step; the last checkpoint is kept"


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    loss: float
    """Mean over the supervised tokens of the global batch."""
    gradient_norm: float
    """Before clipping, over all ranks."""
    supervised_tokens: int
    tokens: int
    """Positions computed, padding included, over all ranks."""
    stop: bool
    """Some rank has been asked to stop."""


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: PreparedSplit,
    training: TrainingPlan,
    *,
    step: int,
    learning_rate: float,
    gang: Gang,
    autocast: torch.dtype | None,
    stop_requested: bool,
) -> StepResult:
    """Do step `step` (counted from 0). Raises NonFiniteError on all ranks alike, before any weight is touched."""
    sequences = global_batch(step, training.global_batch_size, training.seed, data.num_sequences)
    supervised = data.supervised_tokens(sequences)
    # FSDP averages gradients over ranks; the global mean over tokens needs their sum.
    scale = gang.world_size / max(supervised, 1)
    local_loss, tokens = 0.0, 0
    for micro_step in range(training.gradient_accumulation_steps):
        batch = data.batch(micro_batch(sequences, micro_step, gang.rank, gang.world_size, training.micro_batch_size))
        seed_forward_pass(training.seed, step, micro_step, gang.rank)
        loss = summed_loss(model, batch, gang.device, autocast)
        torch.autograd.backward(loss * scale)
        local_loss += float(loss.detach())
        tokens += batch.input_ids.numel()
    gradients = local_gradients(model)
    squares = float(squared_norm(gradients, gang.device))
    total_loss, total_squares, total_tokens, stop = gang.sum([local_loss, squares, float(tokens), float(stop_requested)])
    mean_loss, norm = total_loss / max(supervised, 1), math.sqrt(total_squares) if total_squares >= 0 else math.nan
    if not (math.isfinite(mean_loss) and math.isfinite(norm)):
        raise NonFiniteError(f"step {step + 1}: loss is {mean_loss}, gradient norm is {norm}", NON_FINITE_HINT, step=step + 1)
    if 0 < training.max_grad_norm < norm:
        for gradient in gradients:
            gradient.mul_(training.max_grad_norm / norm)
    set_learning_rate(optimizer, learning_rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(mean_loss, norm, supervised, int(total_tokens), stop > 0)


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's part of every gradient; sharded parts of different ranks never overlap."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return [gradient for gradient in local if gradient.numel()]


def squared_norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of all squares, in float32."""
    if not gradients:
        return torch.zeros((), device=device)
    norm: torch.Tensor = nn.utils.get_total_norm([gradient.float() for gradient in gradients])
    return norm.to(device).square()

"""An optimizer step, and the loss on the held-out sequences, which all ranks compute together.

The seed of each forward pass in training depends on step, micro-step and rank, so a resumed run gets the same random numbers.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune_job.plan.run_plan import TrainingPlan
from finetune_trainer.errors import NonFiniteError
from finetune_trainer.model.fsdp_versions import Reduction, reducing
from finetune_trainer.model.objective import Objective, Split
from finetune_trainer.observe.steps import StepResult
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.train.batches import Prefetch, global_batch, micro_batch
from finetune_trainer.train.optimizers import set_learning_rate
from finetune_trainer.train.policy import UNSCALED, halved_loss_scale
from finetune_trainer.train.virtual_ranks import VirtualRanks, flat_gradients, ordered_sum, summed_in_order, take_gradients

log = logging.getLogger(__name__)

NON_FINITE_HINT = "lower learningRate, raise warmupRatio, or look at the records of this step; the last checkpoint is kept"


class StepBatches:
    """The batches of one rank, step by step."""

    def __init__(self, data: Split[Any], training: TrainingPlan, gang: Gang, virtual: VirtualRanks | None = None) -> None:
        """virtual: virtual ranks, of which this rank may compute several in turn; None: it computes only its own part."""
        self.data, self.virtual = data, virtual
        self._training, self._gang = training, gang
        # Called by the loop and by the prefetching thread, which may be one step ahead.
        self.sequences = lru_cache(maxsize=2)(self._sequences)
        self._prefetch: Prefetch[Any] = Prefetch(
            self._batch, training.gradient_accumulation_steps * (virtual.rounds if virtual else 1)
        )

    def _sequences(self, step: int) -> list[int]:
        """Return the global batch of a step."""
        return global_batch(step, self._training.global_batch_size, self._training.seed, self.data.num_sequences)

    def take(self, step: int, micro_step: int, number: int = 0) -> tuple[Any, float]:
        """Return this rank's batch of a micro-step and the seconds spent waiting for it. number: the virtual rank's round."""
        return self._prefetch.take(step, number * self._training.gradient_accumulation_steps + micro_step)

    def _batch(self, step: int, position: int) -> Any:
        number, micro_step = divmod(position, self._training.gradient_accumulation_steps)
        rank, ranks = self._gang.rank, self._gang.world_size
        if self.virtual is not None:
            (rank, _), ranks = self.virtual.in_round(number), self.virtual.count
        return self.data.batch(micro_batch(self.sequences(step), micro_step, rank, ranks, self._training.micro_batch_size))


@dataclass
class StepTotals:
    """Totals of the forward and backward passes of one step on this rank."""

    losses: torch.Tensor
    """Losses in float64: one for each virtual rank that counts on this rank, or just one without virtual ranks."""
    tokens: int = 0
    squared_document_lengths: int = 0
    data_seconds: float = 0.0


@dataclass(frozen=True)
class StepInputs:
    """Inputs that all steps of a run share."""

    model: nn.Module
    objective: Objective[Any, Any]
    batches: StepBatches
    training: TrainingPlan
    gang: Gang
    autocast: torch.dtype | None
    reduction: Reduction = field(default_factory=Reduction)


def optimizer_step(
    inputs: StepInputs,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    learning_rate: float,
    stop_requested: bool,
    loss_scale: float = UNSCALED,
) -> StepResult:
    """Do step `step`, counted from 0. Raises NonFiniteError on all ranks, before any weight is changed.

    loss_scale: factor of the loss. If gradients overflow, they are computed again with half the factor.
    """
    model, batches, gang, max_norm = inputs.model, inputs.batches, inputs.gang, inputs.training.max_grad_norm
    clock = _Clock(gang.device)
    terms = inputs.objective.num_terms(batches.data, batches.sequences(step))
    data_seconds, scale, virtual = 0.0, loss_scale, batches.virtual
    # FSDP averages gradients over ranks, but the global mean over terms needs their sum.
    num_averaged = 1 if virtual else gang.world_size
    while True:
        totals = compute_gradients(inputs, step=step, weight=scale * num_averaged / max(terms, 1))
        data_seconds += totals.data_seconds
        gradients = local_gradients(model)
        # This is the only place in a step where the host waits for the device.
        *losses, squares = torch.cat([totals.losses, squared_norm(gradients, gang.device).double().view(1)]).tolist()
        local_loss = summed_in_order(losses, virtual) if virtual else losses[0]
        if virtual and not gang.is_first:
            # Every rank already has the sums over all virtual ranks, so only the first rank contributes them.
            local_loss = squares = 0.0
        by_rank = [0.0] * gang.world_size
        by_rank[gang.rank] = clock.seconds(data_seconds)
        total_loss, total_squares, total_tokens, total_squared_lengths, stop, *compute_seconds = gang.sum(
            [local_loss, squares, float(totals.tokens), float(totals.squared_document_lengths), float(stop_requested), *by_rank]
        )
        mean_loss = total_loss / num_averaged / scale
        norm = math.sqrt(total_squares) / scale if total_squares >= 0 else math.nan
        smaller = halved_loss_scale(scale)
        if math.isfinite(norm) or not math.isfinite(mean_loss) or smaller is None:
            break
        optimizer.zero_grad(set_to_none=True)
        log.info("step %d: gradients overflow with loss scale %g; trying again with %g", step + 1, scale, smaller)
        scale = smaller
    if not (math.isfinite(mean_loss) and math.isfinite(norm)):
        raise NonFiniteError(f"step {step + 1}: loss is {mean_loss}, gradient norm is {norm}", NON_FINITE_HINT, step=step + 1)
    factor = (max_norm / norm if 0 < max_norm < norm else 1.0) / scale
    # There are no gradients if this rank holds no element of any trained parameter.
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    set_learning_rate(optimizer, learning_rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(
        loss=mean_loss,
        gradient_norm=norm,
        supervised_tokens=terms,
        tokens=int(total_tokens),
        squared_document_lengths=int(total_squared_lengths),
        data_seconds=data_seconds,
        compute_seconds=tuple(compute_seconds),
        stop=stop > 0,
        loss_scale=scale,
    )


def compute_gradients(inputs: StepInputs, *, step: int, weight: float) -> StepTotals:
    """Do all forward and backward passes of a step. They add to existing gradients. weight: factor of each loss term."""
    passes = partial(_passes, inputs, step=step, weight=weight)
    virtual = inputs.batches.virtual
    return passes() if virtual is None else _ordered(passes, inputs.model, virtual)


def _passes(
    inputs: StepInputs, *, step: int, weight: float, rank: int | None = None, number: int = 0, ends_step: bool = True
) -> StepTotals:
    """Do forward and backward passes for each micro-step.

    weight: factor of each loss term. rank, number: the virtual rank whose part is computed, and its round; unset: this rank's
    own part. ends_step: whether this is the last round.
    """
    model, objective, training, gang = inputs.model, inputs.objective, inputs.training, inputs.gang
    totals = StepTotals(torch.zeros(1, dtype=torch.float64, device=gang.device))
    for micro_step in range(training.gradient_accumulation_steps):
        batch, waited = inputs.batches.take(step, micro_step, number)
        totals.data_seconds += waited
        size = objective.size(batch)
        totals.tokens += size.tokens
        totals.squared_document_lengths += size.squared_document_lengths
        seed_forward_pass(training.seed, step, micro_step, gang.rank if rank is None else rank)
        is_last = ends_step and micro_step == training.gradient_accumulation_steps - 1
        with reducing(model, inputs.reduction, is_last=is_last):
            loss = objective.weighted_loss(model, batch, weight, gang.device, inputs.autocast)
            torch.autograd.backward(loss)
        totals.losses += loss.detach()
    return totals


def _ordered(passes: Callable[..., StepTotals], model: nn.Module, virtual: VirtualRanks) -> StepTotals:
    """Run `passes` for each of this rank's virtual ranks in turn; then set gradients to the sums over all virtual ranks."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients, totals, data_seconds = [], [], 0.0
    for number in range(virtual.rounds):
        rank, counts = virtual.in_round(number)
        of_round = passes(rank=rank, number=number, ends_step=number == virtual.rounds - 1)
        data_seconds += of_round.data_seconds
        gradients_of_round = flat_gradients(trained)
        if counts:
            gradients.append(gradients_of_round)
            totals.append(of_round)
    take_gradients(trained, ordered_sum(gradients, virtual))
    return StepTotals(
        losses=torch.cat([total.losses for total in totals]),
        tokens=sum(total.tokens for total in totals),
        squared_document_lengths=sum(total.squared_document_lengths for total in totals),
        data_seconds=data_seconds,
    )


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's part of every gradient. The sharded parts of different ranks do not overlap."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return [gradient for gradient in local if gradient.numel()]


def squared_norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the squares of all gradients, in float32."""
    if not gradients:
        return torch.zeros((), device=device)
    norm: torch.Tensor = nn.utils.get_total_norm([gradient.float() for gradient in gradients])
    return norm.to(device).square()


class _Clock:
    """Measures the time that this rank spends computing, starting when the clock is created."""

    def __init__(self, device: torch.device) -> None:
        self._now = time.thread_time if device.type == "cpu" else time.monotonic
        self._waits_count = device.type != "cpu"
        self._started = self._now()

    def seconds(self, waited: float) -> float:
        """Return the computing time so far. waited: seconds spent waiting for batches, which are not counted."""
        return self._now() - self._started - (waited if self._waits_count else 0.0)


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
    """Return the mean loss over all held-out terms. Leaves the model in training mode. All ranks call this together."""
    rounds = math.ceil(data.num_sequences / (micro_batch_size * gang.world_size))
    terms = objective.num_terms(data, range(data.num_sequences))
    losses = torch.zeros(rounds * gang.world_size, dtype=torch.float64, device=gang.device)
    with _evaluation_mode(model), torch.no_grad():
        for number in range(rounds):
            first = (number * gang.world_size + gang.rank) * micro_batch_size
            sequences = list(range(first, min(first + micro_batch_size, data.num_sequences)))
            # A rank that has no sequence left still computes one, because all ranks must take part in gathering parameters.
            loss = objective.weighted_loss(model, data.batch(sequences or [0]), 1.0, gang.device, autocast)
            if sequences:
                losses[number * gang.world_size + gang.rank] = loss
            after_batch()
    # Summed in the order of the sequences, so that the mean does not depend on the number of ranks.
    return sum(gang.sum(losses.tolist())) / max(terms, 1)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def seed_of(seed: int, step: int, micro_step: int, rank: int) -> int:
    """Return a 63-bit seed for a forward pass. Similar arguments give unrelated seeds."""
    text = f"{seed}/{step}/{micro_step}/{rank}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def seed_forward_pass(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed the generators that a forward pass may use: torch's on all devices, and Python's."""
    value = seed_of(seed, step, micro_step, rank)
    torch.manual_seed(value)
    random.seed(value)

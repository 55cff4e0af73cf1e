"""The trainer's own model, batches and step in forked ranks, with the loss and every gradient of each step kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from finetune_trainer.checkpoint.state import ParameterRange
from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedData, PreparedSplit
from finetune_trainer.model.objective import Objective, Split
from finetune_trainer.model.sharded import build
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.ranks.gang import joined
from finetune_trainer.train.step import StepBatches, StepInputs, optimizer_step
from tests.support.forked_ranks import run_processes
from tests.support.small_gang import whole

Recorded = list[tuple[float, dict[str, torch.Tensor]]]
"""Loss and flat float32 gradients of each step, by the names of the model before it was sharded."""


class RecordingDescent(torch.optim.SGD):
    """Plain gradient descent that keeps this rank's part of each gradient that it is asked to apply."""

    def __init__(self, found: list[ParameterRange], rate: float) -> None:
        parameters = list({id(piece.holder): piece.holder for piece in found}.values())
        super().__init__([{"params": parameters, "learning_rate_scale": 1.0}], lr=rate)
        self.found = found
        self.recorded: list[dict[str, tuple[tuple[int, ...], int, torch.Tensor]]] = []

    def step(self, closure: Any = None) -> None:
        parts = {}
        for piece in self.found:
            gradient = piece.holder.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if piece.stop > piece.start:
                values = local.view(-1)[piece.offset : piece.offset + piece.stop - piece.start].float().clone()
                parts[piece.name] = (piece.shape, piece.start, values)
        self.recorded.append(parts)
        super().step(closure)


def same_split(data: PreparedSplit) -> Split[Any]:
    """The prepared sequences as they are."""
    return data


def recorded_steps(
    context: RunContext,
    directory: Path,
    steps: int,
    rate: float,
    objective: Objective[Any, Any] | None = None,
    split_of: Callable[[PreparedSplit], Split[Any]] = same_split,
) -> Recorded:
    """`steps` optimizer steps on as many ranks as the plan has. `directory`: for the ranks' files."""
    world_size = context.plan.parallelism.world_size
    body = partial(_run_rank, context, directory, steps, rate, objective or NextToken(), split_of)
    codes = run_processes([partial(body, rank, world_size) for rank in range(world_size)])
    assert codes == [0] * world_size
    found = [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(world_size)]
    done: Recorded = []
    for step in range(steps):
        assert len({losses[step] for losses, _ in found}) == 1, "every rank knows the same loss"
        done.append((found[0][0][step], whole(recorded[step] for _, recorded in found)))
    return done


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def _run_rank(
    context: RunContext,
    directory: Path,
    steps: int,
    rate: float,
    objective: Objective[Any, Any],
    split_of: Callable[[PreparedSplit], Split[Any]],
    rank: int,
    world_size: int,
) -> None:
    data, training = split_of(PreparedData.open(context.workspace.prepared).train), context.plan.training
    with joined(rank, world_size, rank, f"file://{directory}/store") as gang:
        model = build(context.plan, context.base_model, gang, objective)
        optimizer = RecordingDescent(model.pieces, rate)
        batches = StepBatches(data, training, gang)
        inputs = StepInputs(model.module, objective, batches, training, gang, model.autocast, model.reduction)
        losses = [
            optimizer_step(inputs, optimizer, step=step, learning_rate=rate, stop_requested=False).loss for step in range(steps)
        ]
        torch.save((losses, optimizer.recorded), directory / f"{rank}.pt")

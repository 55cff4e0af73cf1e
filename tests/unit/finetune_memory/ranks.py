"""Ranks that build, train one step, and count every byte that they keep."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune_job.plan.element_types import resolve_elements
from finetune_memory.describe import model_shape, read_model
from finetune_memory.estimate import quantised_shape
from finetune_memory.optimizers import state_bytes
from finetune_memory.sharding import shards, units_of
from finetune_trainer.context import RunContext
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.model.sharded import build
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.ranks.gang import joined
from finetune_trainer.train.optimizers import build_optimizer
from tests.support.forked_ranks import run_processes

COUNTS = ("weights", "gradients", "optimizer", "constants")


def predicted_bytes(context: RunContext, rank: int) -> dict[str, int]:
    """From config.json alone."""
    plan, files = context.plan, read_model(context.base_model)
    elements = resolve_elements(plan, files.stored)
    shape = quantised_shape(plan, model_shape(plan, files), elements)
    kept = shards(units_of(shape), plan.parallelism.fsdp, plan.parallelism.world_size, rank, elements.param)
    return {
        "weights": kept.frozen + kept.trained,
        "gradients": kept.gradients,
        "optimizer": state_bytes(plan.training, kept.trained_elements, kept.trained_tensors),
        "constants": shape.constant_bytes,
    }


def counted_bytes(contexts: dict[str, RunContext], directory: Path) -> dict[str, list[dict[str, int]]]:
    """What each rank of each case really keeps, by case and rank."""
    world_size = next(iter(contexts.values())).plan.parallelism.world_size
    bodies = [partial(_count_all, contexts, directory, rank, world_size) for rank in range(world_size)]
    codes = run_processes(bodies)
    assert codes == [0] * world_size, f"a rank failed: {codes}"
    found = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    return {name: [each[name] for each in found] for name in contexts}


def _count_all(contexts: dict[str, RunContext], directory: Path, rank: int, world_size: int) -> None:
    with joined(rank, world_size, rank, f"file://{directory}/store") as gang:
        found = {name: _count(context, gang) for name, context in contexts.items()}
    (directory / f"rank-{rank}.json").write_text(json.dumps(found))


def _count(context: RunContext, gang: Any) -> dict[str, int]:
    plan, objective = context.plan, NextToken()
    model = build(plan, context.base_model, gang, objective)
    optimizer = build_optimizer(model.pieces, plan)
    weights = _bytes([parameter.detach() for parameter in model.module.parameters()])
    constants = _bytes(_constants(model.module))
    batch = PreparedData.open(context.workspace.prepared).train.batch([gang.rank])
    loss = objective.weighted_loss(model.module, batch, 1.0, gang.device, model.autocast)
    torch.autograd.backward(loss)
    gradients = [parameter.grad for parameter in model.module.parameters() if parameter.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": weights,
        "gradients": _bytes(gradients),
        "optimizer": sum(_local(value).numel() * value.element_size() for value in states),
        "constants": constants,
    }


def _constants(model: torch.nn.Module) -> list[torch.Tensor]:
    """Scales and code books of packed weights."""
    found = []
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None) or getattr(module, "quant_state", None)
        for each in (state, getattr(state, "state2", None)):
            if each is not None:
                found += [each.absmax, each.code]
        if state is not None and state.offset is not None:
            found.append(state.offset)
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages on this rank, each once."""
    storages = {_local(tensor).untyped_storage().data_ptr(): _local(tensor).untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local

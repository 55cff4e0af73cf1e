"""Base model, adapters and sharding together: what the training loop trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from finetune_job.api.training import ActivationCheckpointing
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.checkpoint.state import Piece, check_complete, pieces
from finetune_trainer.gang import Gang
from finetune_trainer.model import fsdp1, fsdp2
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.invariants import check_trainable, trainable_shapes
from finetune_trainer.model.load import load_base_model, stored_dtype


@dataclass(frozen=True)
class TrainedModel:
    """A model ready to train."""

    module: nn.Module
    pieces: list[Piece]
    """What this rank keeps of each trainable parameter."""
    shapes: dict[str, tuple[int, ...]]
    """Global shape of each trainable parameter."""
    autocast: torch.dtype | None
    """Element type of the computation where no sharding casts the parameters."""


def build(plan: RunPlan, base_model: Path, gang: Gang) -> TrainedModel:
    """Load, adapt, shard, and assert that nothing was lost on the way. Called by all ranks together."""
    dtypes = resolve_dtypes(plan, stored_dtype(base_model))
    base = load_base_model(plan, base_model, gang.device)
    if plan.training.activation_checkpointing is ActivationCheckpointing.FULL:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model: nn.Module = base if plan.method.lora is None else attach(base, plan)
    check_trainable(model, plan)
    shapes = trainable_shapes(model)
    fsdp = plan.parallelism.fsdp
    if gang.world_size == 1:
        model = model.to(gang.device)
    elif fsdp.version == 2:
        model = fsdp2.shard(model, fsdp, dtypes, init_device_mesh(gang.device.type, (gang.world_size,)))
    else:
        model = fsdp1.shard(model, fsdp, dtypes, gang.device)
    model.train()
    found = pieces(model)
    check_complete(shapes, found)
    # FSDP 1 casts the parameters of each unit to `param`, but leaves what a float32 adapter computes in float32: under PEFT's
    # policy its leaves are units of their own, and the products of both meet in one layer. FSDP 2 casts inputs and outputs too.
    casts = gang.world_size > 1 and fsdp.version == 2
    return TrainedModel(model, found, shapes, None if casts else dtypes.param)

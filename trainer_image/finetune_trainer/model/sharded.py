"""Base model, adapters and sharding together: what the training loop trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from finetune_job.api.method import MethodType
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.checkpoint.state import Piece, check_complete, pieces
from finetune_trainer.model import fsdp1, fsdp2
from finetune_trainer.model.activations import checkpoint_activations
from finetune_trainer.model.adapters import attach, fixed_tensors
from finetune_trainer.model.compilation import compile_layers
from finetune_trainer.model.delora import compute_in_float32
from finetune_trainer.model.dtypes import computes_in_float16, resolve_dtypes
from finetune_trainer.model.invariants import check_decomposed, check_magnitudes, check_trainable, trainable_shapes
from finetune_trainer.model.load import frozen_names, load_base_model, stored_dtype
from finetune_trainer.model.load_shards import fill, hollow_base_model, measure_magnitudes, read_into, read_token_rows
from finetune_trainer.model.objective import Objective
from finetune_trainer.model.reduction import Reduction, reduces_every_micro_step
from finetune_trainer.model.saved_embeddings import hand_on
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.weights.headers import TensorHeader

HOLD_BUFFERS = (MethodType.VERA, MethodType.PVERA, MethodType.DELORA, MethodType.TINYLORA, MethodType.UNILORA)
"""Methods that multiply by buffers: random projections, norms of the base's weights."""


@dataclass(frozen=True)
class TrainedModel:
    """A model ready to train."""

    module: nn.Module
    pieces: list[Piece]
    """What this rank keeps of each trainable parameter."""
    shapes: dict[str, tuple[int, ...]]
    """Global shape of each trainable parameter."""
    fixed: dict[str, torch.Tensor]
    """By stored name, what an adapter or a model holds beside its trained parameters. Empty on all ranks but the first."""
    autocast: torch.dtype | None
    """Element type of the computation where no sharding casts the parameters."""
    reduction: Reduction
    scales_loss: bool
    """Whether a gradient may pass through float16."""


def build(plan: RunPlan, base_model: Path, gang: Gang, objective: Objective[Any, Any]) -> TrainedModel:
    """Load, adapt, shard, and assert that nothing was lost on the way. Called by all ranks together."""
    stored = stored_dtype(base_model)
    dtypes = resolve_dtypes(plan, stored)
    check_decomposed(plan, stored)
    # A single rank holds all of it anyway.
    hollow = hollow_base_model(plan, base_model) if gang.world_size > 1 else None
    base = hollow.module if hollow else load_base_model(plan, base_model, gang.device)
    # Adapters freeze all of the base.
    frozen = frozenset() if plan.method.trains_adapter else frozen_names(base)
    model: nn.Module = attach(base, plan) if plan.method.trains_adapter else base
    if plan.method.type is MethodType.DELORA and torch.float16 in (dtypes.load, dtypes.param):
        compute_in_float32(model)
    # After PEFT, which would otherwise ask for gradients of the embeddings' output.
    checkpoint_activations(base, plan.training.activation_checkpointing)
    if hollow is not None:
        if plan.method.type is MethodType.DORA:
            measure_magnitudes(model, hollow.headers)
        read_token_rows(model, hollow.headers)
    check_magnitudes(model)
    objective.install(model)
    check_trainable(model, plan, frozen)
    shapes = trainable_shapes(model)
    fixed: dict[str, torch.Tensor] = {}
    if isinstance(model, PeftModel) and gang.is_first:
        # Copies: sharding frees or cuts the originals.
        fixed = {name: tensor.cpu().clone() for name, tensor in fixed_tensors(model).items()}
    elif gang.is_first:
        fixed = {name: _whole(model.get_parameter(name), hollow.headers[name] if hollow else None) for name in sorted(frozen)}
    fsdp = plan.parallelism.fsdp
    # DoRA multiplies weights of two units, which FSDP 1 would cast at different times; autocast casts both alike. Packed weights
    # are flattened with what is held beside them and are no numbers; autocast leaves them as they are.
    by_autocast = plan.method.type in (MethodType.DORA, MethodType.QLORA) and dtypes.param is not torch.float32
    if gang.world_size == 1 or dtypes.param is None or (fsdp.version == 1 and by_autocast):
        hand_on(model, dtypes.load)
    if plan.training.compile:
        compile_layers(model, fsdp)
    if gang.world_size == 1:
        model = model.to(gang.device)
    elif fsdp.version == 2:
        model = fsdp2.shard(model, fsdp, dtypes, init_device_mesh(gang.device.type, (gang.world_size,)))
    else:
        cast = replace(dtypes, param=None) if by_autocast else dtypes
        model = fsdp1.shard(model, fsdp, cast, gang.device)
    if hollow is not None:
        fill(model, pieces(model, frozen=True), hollow.headers, dtypes.load)
    model.train()
    found = pieces(model)
    check_complete(shapes, found)
    # FSDP 1 casts the parameters of each unit to `param`, but leaves what a float32 adapter computes in float32: under PEFT's
    # policy its leaves are units of their own, and the products of both meet in one layer. FSDP 2 casts inputs and outputs too.
    # Buffers it does not cast.
    casts = gang.world_size > 1 and fsdp.version == 2 and plan.method.type not in HOLD_BUFFERS
    return TrainedModel(
        module=model,
        pieces=found,
        shapes=shapes,
        fixed=fixed,
        autocast=None if casts else dtypes.param,
        reduction=Reduction(
            every_micro_step=reduces_every_micro_step(model, trains_adapter=plan.method.trains_adapter),
            keeps_gathered=gang.world_size > 1 and fsdp.reshard_after_forward is False,
        ),
        scales_loss=computes_in_float16(plan, dtypes),
    )


def _whole(parameter: nn.Parameter, header: TensorHeader | None) -> torch.Tensor:
    """A copy of the values, from the file where the parameter does not have them yet."""
    values = parameter.detach().cpu().clone()
    if header is not None:
        read_into(header, 0, values.view(-1), values.dtype)
    return values

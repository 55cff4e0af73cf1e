"""Base model, adapters and sharding together: what the training loop trains."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from finetune_job.api.inputs import Attention
from finetune_job.api.training import GradientReduction
from finetune_job.plan.run_plan import ATTENTION_FIELD, FsdpPlan, RunPlan
from finetune_job.sharding import reduces_every_micro_step
from finetune_trainer.checkpoint.state import ParameterRange, check_complete, pieces
from finetune_trainer.errors import ConfigError, InvariantError
from finetune_trainer.model import variable_length
from finetune_trainer.model.activation_checkpointing import checkpoint_activations
from finetune_trainer.model.adapters import attach, fixed_tensors, has_first_values
from finetune_trainer.model.compilation import compile_layers
from finetune_trainer.model.dtypes import ModelDtypes, computes_in_float16, resolve_casts, resolve_dtypes
from finetune_trainer.model.first_values import start_from
from finetune_trainer.model.float32_layers import cast_embedding_outputs
from finetune_trainer.model.fsdp_versions import Reduction, shard_with_fsdp1, shard_with_fsdp2
from finetune_trainer.model.fused_adapters import fuse_adapters
from finetune_trainer.model.invariants import check_magnitudes, check_trainable, trainable_shapes
from finetune_trainer.model.load import frozen_names, load_base_model, stored_dtype
from finetune_trainer.model.load_shards import (
    fill_from_files,
    measure_magnitudes,
    read_into,
    read_token_rows,
    unloaded_base_model,
)
from finetune_trainer.model.objective import Objective
from finetune_trainer.model.pack_shards import fill_packed, packed_layers
from finetune_trainer.model.wrap_plan import unit_names
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.weights.headers import TensorHeader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """A model ready to train."""

    module: nn.Module
    pieces: list[ParameterRange]
    """What this rank keeps of each trainable parameter."""
    shapes: dict[str, tuple[int, ...]]
    """Global shape of each trainable parameter."""
    fixed: dict[str, torch.Tensor]
    """By stored name, what an adapter or a model holds that is not trained. Empty on all ranks but the first."""
    autocast: torch.dtype | None
    """Element type to which autocast casts the operands of products; None: no autocast."""
    reduction: Reduction
    scales_loss: bool
    """Whether a gradient may pass through float16."""


def build(
    plan: RunPlan, base_model: Path, gang: Gang, objective: Objective[Any, Any], first_values: Path | None = None
) -> TrainedModel:
    """Load, adapt, shard, and assert that nothing was lost on the way. Called by all ranks together.

    `first_values`: the file of adapters that start from the base's weights.
    """
    stored = stored_dtype(base_model)
    dtypes = resolve_dtypes(plan, stored)
    is_ordered = plan.training.reduction is GradientReduction.ORDERED
    # Adapters that are not sharded are not cast by FSDP, and what computes them must not depend on the number of ranks.
    casts = resolve_casts(plan, dtypes, 1 if is_ordered else gang.world_size)
    fsdp, trains_adapter, is_sharded = plan.parallelism.fsdp, plan.method.trains_adapter, gang.world_size > 1
    # A single rank holds all of it anyway.
    unloaded = unloaded_base_model(plan, base_model, gang.device) if is_sharded else None
    headers = None if unloaded is None else unloaded.headers
    base = load_base_model(plan, base_model, gang.device) if unloaded is None else unloaded.module
    # Adapters freeze all of the base.
    frozen = frozenset() if trains_adapter else frozen_names(base)
    model: nn.Module = attach(base, plan) if trains_adapter else base
    if plan.method.is_fused and isinstance(model, PeftModel):
        fuse_adapters(model, unit_names(model, fsdp) if is_sharded and not is_ordered else ())
    # After PEFT, which would otherwise ask for gradients of the embeddings' output.
    checkpoint_activations(base, plan.training.activation_checkpointing)
    if headers is not None:
        measure_magnitudes(model, headers)
        read_token_rows(model, headers)
    if isinstance(model, PeftModel) and has_first_values(model):
        if first_values is None:
            raise InvariantError("the adapters start from the base's weights, and no first values were computed")
        start_from(model, first_values)
    check_magnitudes(model)
    if plan.model.attention is Attention.VARLEN:
        _install_varlen(base, plan, gang, casts.by_autocast or casts.by_fsdp or dtypes.load)
    objective.install(model)
    check_trainable(model, plan, frozen)
    shapes = trainable_shapes(model)
    fixed = _fixed(model, frozen, headers) if gang.is_first else {}
    if casts.by_fsdp is None:
        cast_embedding_outputs(model, dtypes.load)
    if plan.training.compile:
        compile_layers(model, fsdp)
    packed = packed_layers(model, headers, dtypes.load) if headers is not None and plan.method.quantization is not None else {}
    whole = [parameter for parameter in model.parameters() if parameter.requires_grad] if is_ordered else []
    model = _shard(model, fsdp, replace(dtypes, param=casts.by_fsdp), gang, whole)
    if headers is not None:
        every = pieces(model, frozen=True)
        fill_from_files(model, [piece for piece in every if piece.name not in packed], headers, dtypes.load)
        fill_packed(packed, every, gang)
    model.train()
    found = pieces(model)
    check_complete(shapes, found)
    return TrainedModel(
        module=model,
        pieces=found,
        shapes=shapes,
        fixed=fixed,
        autocast=casts.by_autocast,
        reduction=Reduction(
            every_micro_step=reduces_every_micro_step(fsdp, is_sharded=is_sharded, trains_adapter=trains_adapter),
            keeps_gathered=is_sharded and fsdp.reshard_after_forward is False,
        ),
        scales_loss=computes_in_float16(plan, dtypes),
    )


def _install_varlen(base: PreTrainedModel, plan: RunPlan, gang: Gang, computed: torch.dtype) -> None:
    """On all ranks, or, where it was chosen for a device that one of them does not have, on none."""
    found = gang.gather(variable_length.device_problem(gang.device, computed), str)
    problem = next(filter(None, found), "")
    if not problem:
        variable_length.install(base)
    elif any(choice.field == ATTENTION_FIELD for choice in plan.choices):
        log.warning("%s: sdpa in place of varlen, because %s", ATTENTION_FIELD, problem)
    else:
        raise ConfigError(f"{ATTENTION_FIELD}: varlen: {problem}", f"set {ATTENTION_FIELD}: sdpa, or take another device")


def _shard(model: nn.Module, fsdp: FsdpPlan, dtypes: ModelDtypes, gang: Gang, whole: Sequence[nn.Parameter] = ()) -> nn.Module:
    """The model on this rank's device, with its share of the parameters, and all of those in `whole`."""
    if gang.world_size == 1:
        return model.to(gang.device)
    if fsdp.version == 2:
        return shard_with_fsdp2(model, fsdp, dtypes, init_device_mesh(gang.device.type, (gang.world_size,)), whole)
    return shard_with_fsdp1(model, fsdp, dtypes, gang.device)


def _fixed(model: nn.Module, frozen: Collection[str], headers: Mapping[str, TensorHeader] | None) -> dict[str, torch.Tensor]:
    """By stored name, copies of what is saved and not trained: sharding frees or cuts the originals."""
    if isinstance(model, PeftModel):
        return {name: tensor.cpu().clone() for name, tensor in fixed_tensors(model).items()}
    return {name: _whole(model.get_parameter(name), headers[name] if headers else None) for name in sorted(frozen)}


def _whole(parameter: nn.Parameter, header: TensorHeader | None) -> torch.Tensor:
    """A copy of the values, from the file if the parameter does not have them yet."""
    values = parameter.detach().cpu().clone()
    if header is not None:
        read_into(header, 0, values.view(-1), values.dtype)
    return values

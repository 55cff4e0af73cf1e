"""Builds the model that the training loop trains, from base model, adapters and sharding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from finetune_trainer.model.dtypes import ModelCasts, ModelDtypes, computes_in_float16, resolve_casts, resolve_dtypes
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
from finetune_trainer.model.pack_shards import PackedLayer, fill_packed, packed_layers
from finetune_trainer.model.wrap_plan import unit_names
from finetune_trainer.ranks.gang import Gang
from finetune_trainer.weights.headers import TensorHeader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """A model ready to train."""

    module: nn.Module
    pieces: list[ParameterRange]
    """This rank's pieces of each trainable parameter."""
    shapes: dict[str, tuple[int, ...]]
    """Global shape of each trainable parameter."""
    fixed: dict[str, torch.Tensor]
    """Tensors of an adapter or a model that are not trained, by stored name. Only the first rank has them."""
    autocast: torch.dtype | None
    """Element type to which autocast casts the operands of products; None: no autocast."""
    reduction: Reduction
    scales_loss: bool
    """Whether a gradient may pass through float16."""


@dataclass
class Draft:
    """A model under construction. The build steps read and change it, one after another."""

    plan: RunPlan
    base_model: Path
    gang: Gang
    objective: Objective[Any, Any]
    first_values: Path | None
    """File with first values, for adapters that start from the base's weights."""
    dtypes: ModelDtypes
    casts: ModelCasts
    headers: Mapping[str, TensorHeader] = field(default_factory=dict)
    """Headers of the stored tensors, if each rank reads its shards after sharding; empty if the whole base is loaded."""
    base: PreTrainedModel = field(init=False)
    module: nn.Module = field(init=False)
    frozen: frozenset[str] = frozenset()
    """Parameters of the base that full training leaves frozen. With adapters, all of the base is frozen."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: dict[str, torch.Tensor] = field(default_factory=dict)
    packed: dict[str, PackedLayer] = field(default_factory=dict)
    """Layers that are packed while they are read."""

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are divided among ranks. A single rank holds all of them."""
        return self.gang.world_size > 1

    @property
    def is_ordered(self) -> bool:
        return self.plan.training.reduction is GradientReduction.ORDERED


def _always(_draft: Draft) -> bool:
    return True


def _is_read_in_shards(draft: Draft) -> bool:
    return bool(draft.headers)


def _is_packed_in_shards(draft: Draft) -> bool:
    return bool(draft.headers) and draft.plan.method.quantization is not None


@dataclass(frozen=True)
class BuildStep:
    """A step of building a model, and the condition for running it."""

    name: str
    run: Callable[[Draft], None]
    applies: Callable[[Draft], bool] = _always


def _load(draft: Draft) -> None:
    unloaded = unloaded_base_model(draft.plan, draft.base_model, draft.gang.device) if draft.is_sharded else None
    if unloaded is None:
        draft.base = load_base_model(draft.plan, draft.base_model, draft.gang.device)
    else:
        draft.base, draft.headers = unloaded.module, unloaded.headers
    draft.module = draft.base


def _name_frozen(draft: Draft) -> None:
    draft.frozen = frozenset(frozen_names(draft.base))


def _attach(draft: Draft) -> None:
    draft.module = attach(draft.base, draft.plan)


def _fuse(draft: Draft) -> None:
    if isinstance(draft.module, PeftModel):
        units = unit_names(draft.module, draft.plan.parallelism.fsdp) if draft.is_sharded and not draft.is_ordered else ()
        fuse_adapters(draft.module, units)


def _checkpoint_activations(draft: Draft) -> None:
    checkpoint_activations(draft.base, draft.plan.training.activation_checkpointing)


def _read_small_tensors(draft: Draft) -> None:
    measure_magnitudes(draft.module, draft.headers)
    read_token_rows(draft.module, draft.headers)


def _start_from_first_values(draft: Draft) -> None:
    if draft.first_values is None:
        raise InvariantError("the adapters start from the base's weights, but no first values were computed")
    start_from(draft.module, draft.first_values)


def _has_first_values(draft: Draft) -> bool:
    return isinstance(draft.module, PeftModel) and has_first_values(draft.module)


def _install_attention(draft: Draft) -> None:
    computed = draft.casts.by_autocast or draft.casts.by_fsdp or draft.dtypes.load
    _install_varlen(draft.base, draft.plan, draft.gang, computed)


def _check(draft: Draft) -> None:
    check_magnitudes(draft.module)
    check_trainable(draft.module, draft.plan, draft.frozen)
    draft.shapes = trainable_shapes(draft.module)


def _keep_fixed(draft: Draft) -> None:
    draft.fixed = _fixed(draft.module, draft.frozen, draft.headers)


def _cast_embeddings(draft: Draft) -> None:
    cast_embedding_outputs(draft.module, draft.dtypes.load)


def _compile(draft: Draft) -> None:
    compile_layers(draft.module, draft.plan.parallelism.fsdp)


def _choose_packed(draft: Draft) -> None:
    draft.packed = packed_layers(draft.module, draft.headers, draft.dtypes.load)


def _shard_module(draft: Draft) -> None:
    trained = [parameter for parameter in draft.module.parameters() if parameter.requires_grad]
    dtypes = replace(draft.dtypes, param=draft.casts.by_fsdp)
    draft.module = _shard(draft.module, draft.plan.parallelism.fsdp, dtypes, draft.gang, trained if draft.is_ordered else [])


def _fill_shards(draft: Draft) -> None:
    every = pieces(draft.module, frozen=True)
    unpacked = [piece for piece in every if piece.name not in draft.packed]
    fill_from_files(draft.module, unpacked, draft.headers, draft.dtypes.load)
    fill_packed(draft.packed, every, draft.gang)


STEPS = (
    BuildStep("load", _load),
    BuildStep("name frozen parameters", _name_frozen, lambda draft: not draft.plan.method.trains_adapter),
    BuildStep("attach adapters", _attach, lambda draft: draft.plan.method.trains_adapter),
    BuildStep("fuse adapters", _fuse, lambda draft: draft.plan.method.is_fused),
    # After attaching adapters, because otherwise transformers would request gradients of the embeddings' output.
    BuildStep("checkpoint activations", _checkpoint_activations),
    BuildStep("read small tensors", _read_small_tensors, _is_read_in_shards),
    BuildStep("start from first values", _start_from_first_values, _has_first_values),
    BuildStep("install attention", _install_attention, lambda draft: draft.plan.model.attention is Attention.VARLEN),
    BuildStep("install objective", lambda draft: draft.objective.install(draft.module)),
    BuildStep("check", _check),
    # Sharding frees or cuts the original tensors, so this must come first.
    BuildStep("keep fixed tensors", _keep_fixed, lambda draft: draft.gang.is_first),
    BuildStep("cast embeddings", _cast_embeddings, lambda draft: draft.casts.by_fsdp is None),
    BuildStep("compile", _compile, lambda draft: draft.plan.training.compile),
    BuildStep("choose packed layers", _choose_packed, _is_packed_in_shards),
    BuildStep("shard", _shard_module),
    BuildStep("fill shards", _fill_shards, _is_read_in_shards),
)
"""The steps of building a model, in order. All ranks run each step together."""


def build(
    plan: RunPlan, base_model: Path, gang: Gang, objective: Objective[Any, Any], first_values: Path | None = None
) -> TrainedModel:
    """Load, adapt and shard the model, and check that nothing was lost on the way. All ranks call this together.

    `first_values`: file with first values, for adapters that start from the base's weights.
    """
    dtypes = resolve_dtypes(plan, stored_dtype(base_model))
    # In an ordered reduction FSDP does not shard or cast adapters, and their type must not depend on the number of ranks.
    is_ordered = plan.training.reduction is GradientReduction.ORDERED
    casts = resolve_casts(plan, dtypes, 1 if is_ordered else gang.world_size)
    draft = Draft(plan, base_model, gang, objective, first_values, dtypes, casts)
    for step in STEPS:
        if step.applies(draft):
            step.run(draft)
    draft.module.train()
    trained = pieces(draft.module)
    check_complete(draft.shapes, trained)
    fsdp = plan.parallelism.fsdp
    return TrainedModel(
        module=draft.module,
        pieces=trained,
        shapes=draft.shapes,
        fixed=draft.fixed,
        autocast=casts.by_autocast,
        reduction=Reduction(
            every_micro_step=reduces_every_micro_step(
                fsdp, is_sharded=draft.is_sharded, trains_adapter=plan.method.trains_adapter
            ),
            keeps_gathered=draft.is_sharded and fsdp.reshard_after_forward is False,
        ),
        scales_loss=computes_in_float16(plan, dtypes),
    )


def _install_varlen(base: PreTrainedModel, plan: RunPlan, gang: Gang, computed: torch.dtype) -> None:
    """Install varlen on all ranks, or on none if it was our choice and the device of any rank does not support it."""
    problems = gang.gather(variable_length.device_problem(gang.device, computed), str)
    problem = next(filter(None, problems), "")
    if not problem:
        variable_length.install(base)
    elif any(choice.field == ATTENTION_FIELD for choice in plan.choices):
        log.warning("%s: sdpa in place of varlen, because %s", ATTENTION_FIELD, problem)
    else:
        raise ConfigError(f"{ATTENTION_FIELD}: varlen: {problem}", f"set {ATTENTION_FIELD}: sdpa, or use another device")


def _shard(model: nn.Module, fsdp: FsdpPlan, dtypes: ModelDtypes, gang: Gang, whole: Sequence[nn.Parameter] = ()) -> nn.Module:
    """Return the model on this rank's device, with this rank's shards of the parameters and all parameters in `whole`."""
    if gang.world_size == 1:
        return model.to(gang.device)
    if fsdp.version == 2:
        return shard_with_fsdp2(model, fsdp, dtypes, init_device_mesh(gang.device.type, (gang.world_size,)), whole)
    return shard_with_fsdp1(model, fsdp, dtypes, gang.device)


def _fixed(model: nn.Module, frozen: Collection[str], headers: Mapping[str, TensorHeader]) -> dict[str, torch.Tensor]:
    """Copy what is saved but not trained, because sharding frees or cuts the original tensors. Returns tensors by stored name."""
    if isinstance(model, PeftModel):
        return {name: tensor.cpu().clone() for name, tensor in fixed_tensors(model).items()}
    return {name: _whole(model.get_parameter(name), headers[name] if headers else None) for name in sorted(frozen)}


def _whole(parameter: nn.Parameter, header: TensorHeader | None) -> torch.Tensor:
    """Copy the parameter's values, or read them from the file if they are not loaded yet."""
    values = parameter.detach().cpu().clone()
    if header is not None:
        read_into(header, 0, values.view(-1), values.dtype)
    return values

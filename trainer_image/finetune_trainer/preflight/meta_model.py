"""Fills in a `ModelInspection`: builds the real model and its adapters on torch's meta device.

It uses the same libraries as training. What the trainer asserts after wrapping (model/invariants.py) is asserted here first; a
failure becomes a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.choices import choose_precision
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.inspection.module_use import observe_use
from finetune_trainer.inspection.report import ModelStructure
from finetune_trainer.inspection.skeleton import attach_skeleton_adapters, load_skeleton
from finetune_trainer.model.adapters import adapter_settings, fixed_tensors, saved_shapes, stored_names
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.invariants import check_adapter_bits, check_flat_units, check_trainable, trainable_shapes
from finetune_trainer.model.load import frozen_names, pack_layers, packed_dtype, stored_dtype
from finetune_trainer.model.wrap_plan import layer_classes, unit_names
from finetune_trainer.preflight.library_errors import attaching_error, loading_error
from finetune_trainer.preflight.memory import batches_of, shape_of
from finetune_trainer.preflight.model_inspection import AttachedModel, LoadedModel, ModelInspection
from finetune_trainer.weights.rounding import dtype_name

_PEFT_DOES_NOT_MIND = frozenset({"token-index-unknown", "saved-module-unknown", "adapter-pattern-unmatched"})
"""Rules about unknown names. If only these are broken, PEFT still attaches the rest, whose problems are then also reported."""
_STRETCHED = ("yarn", "llama3")
"""Types of rotary scaling whose factor says how many times longer texts may be than in pretraining."""


def fill_in_use(seen: ModelInspection) -> Iterable[Finding]:
    """Fills in `observed`."""
    seen.observed = None if seen.is_refused else observe_use(seen.plan, seen.directory)
    return ()


def check_loading(seen: ModelInspection) -> Iterable[Finding]:
    """Fills in `loaded` and `precision`. Reports what the files lack, or why the model cannot be built."""
    if seen.is_refused:
        return ()
    try:
        base, findings = load_skeleton(seen.plan, seen.directory)
    except Exception as error:  # noqa: BLE001 - a library reads a user's file: every error is about that file
        return [loading_error(seen, error)]
    seen.precision = choose_precision(seen.plan, _name(stored_dtype(seen.directory)))
    seen.plan = seen.plan.with_choices(seen.precision)
    embedding = base.get_input_embeddings()
    fsdp = seen.plan.parallelism.fsdp
    wrap_classes: tuple[str, ...] = ()
    if fsdp.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        with suppress(ConfigError):  # check_wrap_classes reports an unknown class
            wrap_classes = layer_classes(base, fsdp.transformer_layer_cls_to_wrap)
    seen.loaded = LoadedModel(
        base=base,
        vocabulary_size=int(embedding.weight.shape[0]),
        padding_row=getattr(embedding, "padding_idx", None),
        max_positions=max_positions(base.config, seen.plan.model.max_positions),
        max_row=max_row(base.config),
        wrap_classes=wrap_classes,
    )
    return findings


def attach_adapters(seen: ModelInspection) -> Iterable[Finding]:
    """Fills in `attached`, or reports why the settings cannot work with this model."""
    if any(finding.severity == "error" and finding.rule not in _PEFT_DOES_NOT_MIND for finding in seen.findings):
        return ()
    try:
        seen.attached = _attached(seen.plan, seen.base, seen.directory)
    except TrainerError as error:
        return [attaching_error(seen, error)]
    return ()


def _attached(plan: RunPlan, base: PreTrainedModel, directory: Path) -> AttachedModel:
    stored = stored_dtype(directory)
    if plan.method.quantization is not None:
        pack_layers(base, plan.method.quantization, packed_dtype(plan, resolve_dtypes(plan, stored)))
    model, saved_names = _trained(plan, base, directory)
    check_trainable(model, plan, () if plan.method.trains_adapter else frozen_names(model))
    units = unit_names(model, plan.parallelism.fsdp)
    if plan.parallelism.fsdp.version == 1:
        check_adapter_bits(plan, stored)
        # For stacked weights, check_stacked_weights has a better explanation.
        if plan.parallelism.world_size == 1 or not any(isinstance(module, ParamWrapper) for module in model.modules()):
            check_flat_units(model, units, plan.parallelism.fsdp)
    return AttachedModel(model, saved_names, tuple(units))


def _trained(plan: RunPlan, base: PreTrainedModel, directory: Path) -> tuple[nn.Module, dict[str, str]]:
    """Returns the trained model, and a mapping from the name of each trained parameter to its name in the saved file."""
    if not plan.method.trains_adapter:
        return base, {name: name for name, _ in base.named_parameters()}
    adapted = attach_skeleton_adapters(base, plan, directory)
    try:
        return adapted, stored_names(adapted)
    except (TrainerError, MemoryError):
        raise
    except Exception as error:  # some PEFT methods look at values to know what they would save
        raise ConfigError(
            f"spec.method: PEFT cannot say what it would save of this model: {type(error).__name__}: {error}",
            "use another method, or other settings of it",
        ) from error


def describe_structure(seen: ModelInspection) -> Iterable[Finding]:
    """Fills in `structure`."""
    if seen.loaded is None or seen.is_refused:
        return ()
    loaded, model, units = seen.loaded, seen.trained.model, seen.trained.units
    stored = stored_dtype(seen.directory)
    dtypes = resolve_dtypes(seen.plan, stored)
    trainable = trainable_shapes(model)
    shape = shape_of(model, loaded.base, units, _name(dtypes.load))
    can_recompute = loaded.base.supports_gradient_checkpointing
    seen.structure = ModelStructure(
        wrap_classes=loaded.wrap_classes,
        fsdp_units=units,
        dtypes={use: _name(getattr(dtypes, use)) for use in ("load", "param", "reduce", "save")},
        trainable=trainable,
        saved_tensors=saved_shapes({seen.trained.saved_names[name]: shape for name, shape in trainable.items()}, model),
        fixed_tensors={name: tuple(tensor.shape) for name, tensor in fixed_tensors(model).items()}
        if isinstance(model, PeftModel)
        else {},
        adapter_settings=adapter_settings(model, seen.directory.name) if isinstance(model, PeftModel) else None,
        vocabulary_size=loaded.vocabulary_size,
        max_positions=loaded.max_positions,
        max_row=loaded.max_row,
        stored_dtype=_name(stored),
        shape=shape,
        batches=(
            *seen.precision,
            *batches_of(seen.plan, shape, _name(stored), can_recompute=can_recompute, attention_problem=seen.attention_problem),
        ),
        trains_input_rows_alone=_trains_input_rows_alone(model),
        padding_row=loaded.padding_row,
    )
    return ()


def _trains_input_rows_alone(model: nn.Module) -> bool:
    layers = [layer for layer in model.modules() if isinstance(layer, TrainableTokensLayer)]
    if not isinstance(model, PeftModel) or len(layers) != 1:
        return False
    embedding, head = layers[0].get_base_layer(), model.get_output_embeddings()
    return isinstance(embedding, nn.Embedding) and (head is None or getattr(head, "weight", None) is not embedding.weight)


def _name(dtype: torch.dtype | None) -> str:
    return "as held" if dtype is None else dtype_name(dtype)


def max_positions(config: PreTrainedConfig, wanted: int | None = None) -> int | None:
    """Returns the largest number of positions in a document; None if the configuration does not say.

    wanted: the number that the job sets for rotary positions, which are not limited by a table. Configurations often stretch
    positions by a factor, as Qwen's model cards show for YaRN, but leave `max_position_embeddings` as it is.
    """
    written = getattr(config, "max_position_embeddings", None)
    if type(written) is not int:
        return None
    ropes = list(_ropes(config))
    return wanted if ropes and wanted else max([written, *map(_stretched, ropes)])


def max_row(config: PreTrainedConfig) -> int | None:
    """Returns the maximum number of tokens in a row of a batch; None if unlimited. MPT's code makes biases of this size."""
    written = getattr(config, "max_seq_len", None)
    return written if config.model_type == "mpt" and type(written) is int else None


def _ropes(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yields the sets of rotary parameters: one, or one for each kind of layer."""
    ropes = getattr(config, "rope_parameters", None)
    if isinstance(ropes, dict):
        yield from (rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict))


def _stretched(rope: Mapping[str, Any]) -> int:
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if rope.get("rope_type") not in _STRETCHED or not isinstance(original, int) or not isinstance(factor, int | float):
        return 0
    return int(factor * original) if math.isfinite(factor) else 0

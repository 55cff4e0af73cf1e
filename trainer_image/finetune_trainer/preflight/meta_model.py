"""The real model, adapters and wrap plan, built by the pinned libraries on torch's meta device: structure without weights.

What rules cannot know stands here as findings: names that match nothing, weights that do not fill the model, units that FSDP 1
cannot flatten. The checks are those that the trainer asserts again after wrapping (model/invariants.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune_job.api.method import ALL_LINEAR
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.api.training import ActivationCheckpointing
from finetune_job.catalogue.book import make_finding
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import FieldChange, Finding
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.inspection.declared_weights import load_declared, pack
from finetune_trainer.inspection.model_structure import ModelStructure
from finetune_trainer.inspection.module_use import ModuleUses
from finetune_trainer.inspection.valueless import attach_valueless
from finetune_trainer.model.adapters import adapter_settings, fixed_tensors, stored_names, unfit_for_experts
from finetune_trainer.model.compilation import missing_compiler
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.invariants import (
    check_adapter_bits,
    check_decomposed,
    check_flat_units,
    check_trainable,
    trainable_shapes,
)
from finetune_trainer.model.load import frozen_names, packed_dtype, stored_dtype
from finetune_trainer.model.wrap_plan import layer_classes, unit_names
from finetune_trainer.preflight.attached import check_attached
from finetune_trainer.preflight.bypassed import bypassed_linear, check_units_used, check_used
from finetune_trainer.preflight.coverage import check_coverage
from finetune_trainer.preflight.element_types import check_element_types
from finetune_trainer.preflight.fsdp_units import check_units, stacked_weights
from finetune_trainer.preflight.fused_experts import (
    check_excluded,
    check_layers,
    check_left_out,
    check_ranks_in_file,
    check_saved,
    taken_for_experts,
)
from finetune_trainer.preflight.memory import shape_of
from finetune_trainer.preflight.module_names import check_names, check_parameters, check_settings, check_tokens
from finetune_trainer.preflight.positions import max_positions, max_row
from finetune_trainer.preflight.zero_rows import check_zero_rows

ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
"""Module classes that PEFT's LoRA layers can stand in for (peft.tuners.lora.model, dispatchers)."""

STATELESS = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers, as configurations name them, that hand nothing on; small_model.py measures whether their masks leak."""

_PEFT_DOES_NOT_MIND = frozenset({"token-index-unknown", "saved-module-unknown", "adapter-pattern-unmatched"})
"""Names beside which PEFT attaches what is left, so that what it says of that is said, too."""
_REFUSED_TARGET = re.compile(r"Module '([^']+)' is incompatible with")
"""How PEFT refuses a module by the last part of its name (peft.tuners.tuners_utils._check_lora_target_modules_mamba)."""


def inspect_structure(
    plan: RunPlan, directory: Path, uses: ModuleUses | None = None
) -> tuple[ModelStructure | None, list[Finding]]:
    """The structure, or None where it cannot be built, and every finding. Reads headers only.

    `uses`: what was observed of the model's modules; None where nothing was.
    """
    try:
        base, findings = load_declared(plan, directory)
    except Exception as error:  # noqa: BLE001 - a library meets a file of the user's: whatever it raises is about that file
        if "attn_implementation" in str(error):
            return None, [_attention_unknown(plan, error)]
        return None, [_of_error("model-not-accepted", "spec.model.source", directory.name, error)]
    wrap_classes, found = _wrap_classes(plan, base)
    findings += found
    findings += _compiler_is_missing(plan)
    findings += _cannot_recompute(plan, base)
    # Said beside what else is wrong: the model can be looked at all the same.
    recurrent = [_recurrent(base)] if plan.data.packing and _hands_state_on(base) else []
    vocabulary_size = int(base.get_input_embeddings().weight.shape[0])
    padding_row = getattr(base.get_input_embeddings(), "padding_idx", None)
    findings += _names(plan, base, vocabulary_size)
    limits = max_positions(base.config), max_row(base.config)
    if any(finding.severity == "error" and finding.rule not in _PEFT_DOES_NOT_MIND for finding in findings):
        return None, [*findings, *recurrent]
    try:
        if plan.method.quantization is not None:
            pack(base, plan.method.quantization, packed_dtype(plan, resolve_dtypes(plan, stored_dtype(directory))))
        model, saved_names = _trained(plan, base, directory)
        check_trainable(model, plan, () if plan.method.trains_adapter else frozen_names(model))
        check_decomposed(plan, stored_dtype(directory))
        units = unit_names(model, plan.parallelism.fsdp)
        if plan.parallelism.fsdp.version == 1:
            check_adapter_bits(plan, stored_dtype(directory))
            stacked = stacked_weights(model) if plan.parallelism.world_size > 1 else None
            if stacked is None:
                check_flat_units(model, units, plan.parallelism.fsdp)
            else:
                findings.append(stacked)
    except TrainerError as error:
        field = _named_field(error) or "spec.method"
        conflict = _of_error("model-settings-conflict", field, plan.method.type.value, error)
        if "ParamWrapper" in conflict.message:
            changes = tuple(FieldChange(field=name, value=value) for name, value in unfit_for_experts(plan.method).items())
            conflict = conflict.model_copy(update={"changes": changes})
        return None, [*findings, *recurrent, conflict if uses is None else _with_bypassed(conflict, plan, base, uses)]
    findings += recurrent
    if plan.parallelism.world_size > 1:
        findings += check_units(model, units, plan)
    dtypes = resolve_dtypes(plan, stored_dtype(directory))
    findings += check_element_types(model, plan, dtypes, packed_dtype(plan, dtypes))
    findings += check_attached(model, plan.method)
    if uses is not None:
        findings += check_used(model, plan.method, uses)
        if plan.parallelism.world_size > 1:
            findings += check_units_used(units, uses, plan)
    if plan.method.lora is not None:
        findings += check_coverage(model, plan.method.lora)
        findings += check_left_out(model, plan.method.lora)
        findings += check_ranks_in_file(model)
        findings += check_zero_rows(model, plan.method.lora, directory)
    if any(finding.severity == "error" for finding in findings):
        return None, findings
    trainable = trainable_shapes(model)
    structure = ModelStructure(
        wrap_classes=wrap_classes,
        fsdp_units=tuple(units),
        dtypes={use: _name(getattr(dtypes, use)) for use in ("load", "param", "reduce", "save")},
        trainable=trainable,
        saved_tensors={saved_names[name]: shape for name, shape in trainable.items()},
        fixed_tensors={name: tuple(tensor.shape) for name, tensor in fixed_tensors(model).items()}
        if isinstance(model, PeftModel)
        else {},
        adapter_settings=adapter_settings(model, directory.name) if isinstance(model, PeftModel) else None,
        vocabulary_size=vocabulary_size,
        max_positions=limits[0],
        max_row=limits[1],
        stored_dtype=_name(stored_dtype(directory)),
        shape=shape_of(model, base, units, _name(dtypes.load)),
        trains_input_rows_alone=_trains_input_rows_alone(model),
        padding_row=padding_row,
    )
    return structure, findings


def _trains_input_rows_alone(model: nn.Module) -> bool:
    layers = [layer for layer in model.modules() if isinstance(layer, TrainableTokensLayer)]
    if not isinstance(model, PeftModel) or len(layers) != 1:
        return False
    embedding, head = layers[0].get_base_layer(), model.get_output_embeddings()
    return isinstance(embedding, nn.Embedding) and (head is None or getattr(head, "weight", None) is not embedding.weight)


def _names(plan: RunPlan, base: PreTrainedModel, vocabulary_size: int) -> list[Finding]:
    """Names in the adapter's settings that mean nothing in this model."""
    modules = [name for name, _ in base.named_modules()]
    if plan.method.adapter is not None:
        return check_settings(plan.method.type, plan.method.adapter, modules)
    if plan.method.lora is None:
        return []
    adaptable = [name for name, module in base.named_modules() if isinstance(module, ADAPTABLE)]
    parameters = {name: parameter.ndim for name, parameter in base.named_parameters()}
    taken = taken_for_experts(plan.method.lora, base)
    return [
        *check_names(plan.method.lora, adaptable, modules, parameters, taken),
        *check_layers(plan.method.lora, taken),
        *check_excluded(plan.method.lora, base),
        *check_saved(plan.method.lora, base),
        *check_parameters(plan.method.lora, parameters),
        *check_tokens(plan.method.lora, vocabulary_size),
    ]


def _trained(plan: RunPlan, base: PreTrainedModel, directory: Path) -> tuple[nn.Module, dict[str, str]]:
    """The model that is trained, and the file's name of each trained parameter."""
    if not plan.method.trains_adapter:
        return base, {name: name for name, _ in base.named_parameters()}
    adapted = attach_valueless(base, plan, directory)
    try:
        return adapted, stored_names(adapted)
    except (TrainerError, MemoryError):
        raise
    except Exception as error:  # a method of PEFT that looks at values to say what it would save
        raise ConfigError(
            f"spec.method: PEFT cannot say what it would save of this model: {type(error).__name__}: {error}",
            "use another method, or other settings of it",
        ) from error


def _with_bypassed(conflict: Finding, plan: RunPlan, base: nn.Module, uses: ModuleUses) -> Finding:
    """The refusal of a target, with a fix that names, too, what preflight would refuse next."""
    refused = _REFUSED_TARGET.search(conflict.message)
    if refused is None or plan.method.lora is None or plan.method.lora.target_modules != (ALL_LINEAR,):
        return conflict
    excluded = list(dict.fromkeys([*plan.method.lora.exclude_modules, refused[1], *bypassed_linear(base, uses)]))
    field = "spec.method.lora.excludeModules"
    change = FieldChange(field=field, value=excluded)
    return conflict.model_copy(update={"fix": f"set {field}: [{', '.join(excluded)}]", "changes": (change,)})


def _attention_unknown(plan: RunPlan, error: Exception) -> Finding:
    """Transformers has no such attention for this architecture."""
    return make_finding(
        "attention-not-supported",
        field="spec.model.attention",
        value=plan.model.attention.value,
        message=f"transformers has no such attention for this model: {str(error)[:300]}",
        fix="set spec.model.attention: eager",
        changes={"spec.model.attention": "eager"},
    )


def _hands_state_on(base: PreTrainedModel) -> bool:
    """Whether transformers says so of the class, unless every layer of this model is one of attention (Granite 4 without Mamba)."""
    kinds = base.config.to_dict().get("layer_types") or ()
    return bool(getattr(base, "_is_stateful", False)) and not (kinds and STATELESS.issuperset(kinds))


def _recurrent(base: PreTrainedModel) -> Finding:
    """Transformers marks models that hand a state from token to token; no attention mask can keep documents apart in them."""
    return make_finding(
        "packing-with-recurrent-layers",
        field="spec.data.packing",
        value="true",
        message=f"{type(base).__name__} has recurrent layers, whose state would run on from one record of a sequence into the next",
        fix="set spec.data.packing: false",
        changes={"spec.data.packing": False},
    )


def _compiler_is_missing(plan: RunPlan) -> list[Finding]:
    """Training runs in this image, too, so what is not here will not be there."""
    has_gpu = torch.cuda.is_available() if plan.placement is None else plan.placement.gpu_resource_name is not None
    device_type = "cuda" if has_gpu else "cpu"
    missing = missing_compiler(device_type) if plan.training.compile else ()
    if not missing:
        return []
    return [
        make_finding(
            "compile-without-compiler",
            field="spec.training.compile",
            value="true",
            message=f"torch.compile for {device_type} calls a compiler ({', '.join(missing)}), and the trainer image has none",
            fix="set spec.training.compile: false, or use a trainer image with a compiler",
            changes={"spec.training.compile": False},
        )
    ]


def _cannot_recompute(plan: RunPlan, base: PreTrainedModel) -> list[Finding]:
    """Some architectures of transformers know no activation checkpointing."""
    kind = plan.training.activation_checkpointing
    if kind is ActivationCheckpointing.NONE or base.supports_gradient_checkpointing:
        return []
    field = "spec.training.activationCheckpointing"
    return [
        make_finding(
            "activation-checkpointing-not-supported",
            field=field,
            value=kind.value,
            message=f"{type(base).__name__} of transformers cannot compute its layers again in backward",
            fix=f"set {field}: None",
            changes={field: ActivationCheckpointing.NONE.value},
        )
    ]


def _wrap_classes(plan: RunPlan, base: nn.Module) -> tuple[tuple[str, ...], list[Finding]]:
    fsdp = plan.parallelism.fsdp
    if fsdp.auto_wrap_policy is not AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return (), []
    try:
        return layer_classes(base, fsdp.transformer_layer_cls_to_wrap), []
    except ConfigError as error:
        given = fsdp.transformer_layer_cls_to_wrap
        field = "spec.parallelism.fsdp.transformerLayerClsToWrap"
        found = _of_error("wrap-class-unknown", field, "unset" if given is None else ", ".join(given), error)
        return (), [found.model_copy(update={"changes": (_other_classes(field, given, base),)})]


def _other_classes(field: str, given: Collection[str] | None, base: nn.Module) -> FieldChange:
    """The model's own classes that were probably meant; where a name is like none, those that the model names itself."""
    if given is None:
        return FieldChange(field="spec.parallelism.fsdp.autoWrapPolicy", value=AutoWrapPolicy.NO_WRAP.value)
    present = sorted({type(module).__name__ for module in base.modules()})
    near = [difflib.get_close_matches(name, present, n=1, cutoff=0.6) for name in given]
    classes = list(dict.fromkeys(found[0] for found in near if found))
    return FieldChange(field=field, value=classes if near and all(near) else None)


def _named_field(error: TrainerError) -> str | None:
    """Our errors begin with the field that they are about."""
    field, colon, _ = str(error).partition(":")
    return field if colon and field.startswith("spec.") else None


def _of_error(rule: str, field: str, value: str, error: Exception) -> Finding:
    message = str(error).removeprefix(f"{field}: ")
    fix = error.hint if isinstance(error, TrainerError) else ""
    return make_finding(
        rule,
        field=field,
        value=value,
        message=message if isinstance(error, TrainerError) else f"{type(error).__name__}: {message}",
        fix=fix or "check config.json and the architecture that it names against the libraries of the trainer image",
    )


def _name(dtype: torch.dtype | None) -> str:
    return "as held" if dtype is None else str(dtype).removeprefix("torch.")

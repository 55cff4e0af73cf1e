"""The real model, adapters and wrap plan, built by the pinned libraries on torch's meta device: structure without weights.

What rules cannot know stands here as findings: names that match nothing, weights that do not fill the model, units that FSDP 1
cannot flatten. The checks are those that the trainer asserts again after wrapping (model/invariants.py). Called by run.py.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.model.adapters import adapter_settings, attach, fixed_tensors, stored_names
from finetune_trainer.model.compilation import missing_compiler
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.invariants import check_adapter_bits, check_flat_units, check_trainable, trainable_shapes
from finetune_trainer.model.load import build_on_meta, build_unwritten, stored_dtype
from finetune_trainer.model.wrap_plan import layer_classes, unit_names
from finetune_trainer.preflight.model_structure import ModelStructure
from finetune_trainer.preflight.module_names import check_names, check_settings

ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
"""Module classes that PEFT's LoRA layers can stand in for (peft.tuners.lora.model, dispatchers)."""


def inspect_structure(plan: RunPlan, directory: Path) -> tuple[ModelStructure | None, list[Finding]]:
    """The structure, or None where it cannot be built, and every finding. Reads headers only."""
    try:
        base = build_on_meta(plan, directory)
    except Exception as error:  # noqa: BLE001 - a library meets a file of the user's: whatever it raises is about that file
        return None, [_finding("model-not-accepted", "spec.model.source", directory.name, error)]
    findings = _weights_fill(plan, directory)
    wrap_classes, found = _wrap_classes(plan, base)
    findings += found
    findings += _compiler_is_missing(plan)
    if plan.data.packing and getattr(base, "_is_stateful", False):
        findings.append(_recurrent(base))
    modules = [name for name, _ in base.named_modules()]
    if plan.method.lora is not None:
        adaptable = [name for name, module in base.named_modules() if isinstance(module, ADAPTABLE)]
        findings += check_names(plan.method.lora, adaptable, modules)
    if plan.method.adapter is not None:
        findings += check_settings(plan.method.type, plan.method.adapter, modules)
    vocabulary_size = int(base.get_input_embeddings().weight.shape[0])
    max_positions = getattr(base.config, "max_position_embeddings", None)
    if findings:
        return None, findings
    try:
        model, saved_names = _trained(plan, base, directory)
        check_trainable(model, plan)
        units = unit_names(model, plan.parallelism.fsdp)
        if plan.parallelism.fsdp.version == 1:
            check_adapter_bits(plan, stored_dtype(directory))
            check_flat_units(model, units, use_orig_params=bool(plan.parallelism.fsdp.use_orig_params))
    except TrainerError as error:
        field = _named_field(error) or "spec.method"
        return None, [_finding("model-settings-conflict", field, plan.method.type.value, error)]
    trainable = trainable_shapes(model)
    dtypes = resolve_dtypes(plan, stored_dtype(directory))
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
        max_positions=max_positions if isinstance(max_positions, int) else None,
    )
    return structure, []


def _trained(plan: RunPlan, base: PreTrainedModel, directory: Path) -> tuple[nn.Module, dict[str, str]]:
    """The model that is trained, and the file's name of each trained parameter."""
    if not plan.method.trains_adapter:
        base.train()
        return base, {name: name for name, _ in base.named_parameters()}
    if plan.method.adapter is not None:
        # Some methods compute what they start from, with generators that the meta device does not have.
        adapted = attach(build_unwritten(plan, directory), plan)
        return adapted, stored_names(adapted)
    with torch.device("meta"):
        adapted = attach(base, plan)
    if not plan.method.autocast_adapter_dtype:
        _hold_as_the_base(adapted)
    return adapted, stored_names(adapted)


def _hold_as_the_base(adapted: PeftModel) -> None:
    """What PEFT does as it adds an adapter, except to tensors on the meta device: give it its base layer's element type."""
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            dtype = layer.get_base_layer().weight.dtype
            for name in layer.adapter_layer_names:
                getattr(layer, name).to(dtype)


def _weights_fill(plan: RunPlan, directory: Path) -> list[Finding]:
    """Every weight of the model is in the files, with its shape: transformers would initialise others at random."""
    try:
        _, info = AutoModelForCausalLM.from_pretrained(
            directory,
            device_map={"": "meta"},
            trust_remote_code=plan.model.allow_remote_code,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # noqa: BLE001 - see inspect_structure
        return [_finding("model-not-accepted", "spec.model.source", directory.name, error)]
    findings = []
    for kind, reason in (("missing_keys", "are in none of its files"), ("mismatched_keys", "have another shape in its files")):
        names = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in info[kind])
        if names:
            findings.append(
                Finding(
                    rule="model-weights-incomplete",
                    severity="error",
                    field="spec.model.source",
                    value=names[0],
                    message=f"{len(names)} weights that config.json asks for {reason}, first {', '.join(names[:3])}",
                    fix="copy all files of one and the same model; these weights would start at random",
                )
            )
    return findings


def _recurrent(base: PreTrainedModel) -> Finding:
    """Transformers marks models that hand a state from token to token; no attention mask can keep documents apart in them."""
    return Finding(
        rule="packing-with-recurrent-layers",
        severity="error",
        field="spec.data.packing",
        value="true",
        message=f"{type(base).__name__} has recurrent layers, whose state would run on from one record of a sequence into the next",
        fix="set spec.data.packing: false",
    )


def _compiler_is_missing(plan: RunPlan) -> list[Finding]:
    """Training runs in this image, too, so what is not here will not be there."""
    has_gpu = torch.cuda.is_available() if plan.placement is None else plan.placement.gpu_resource_name is not None
    device_type = "cuda" if has_gpu else "cpu"
    missing = missing_compiler(device_type) if plan.training.compile else ()
    if not missing:
        return []
    return [
        Finding(
            rule="compile-without-compiler",
            severity="error",
            field="spec.training.compile",
            value="true",
            message=f"torch.compile for {device_type} calls a compiler ({', '.join(missing)}), and the trainer image has none",
            fix="set spec.training.compile: false, or use a trainer image with a compiler",
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
        return (), [_finding("wrap-class-unknown", field, "unset" if given is None else ", ".join(given), error)]


def _named_field(error: TrainerError) -> str | None:
    """Our errors begin with the field that they are about."""
    field, colon, _ = str(error).partition(":")
    return field if colon and field.startswith("spec.") else None


def _finding(rule: str, field: str, value: str, error: Exception) -> Finding:
    message = str(error).removeprefix(f"{field}: ")
    fix = error.hint if isinstance(error, TrainerError) else ""
    return Finding(
        rule=rule,
        severity="error",
        field=field,
        value=value,
        message=message if isinstance(error, TrainerError) else f"{type(error).__name__}: {message}",
        fix=fix or "check config.json and the architecture that it names against the libraries of the trainer image",
    )


def _name(dtype: torch.dtype | None) -> str:
    return "as held" if dtype is None else str(dtype).removeprefix("torch.")

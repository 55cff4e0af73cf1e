"""Checks what a model's architecture supports: layer classes to wrap, compilation, activation checkpointing and packing."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator

import torch

from finetune_job.api.method import MethodType
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.api.training import ActivationCheckpointing
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.compilation import missing_compiler
from finetune_trainer.model.wrap_plan import layer_classes
from finetune_trainer.preflight.fsdp_units import CLASSES_FIELD, POLICY_FIELD
from finetune_trainer.preflight.library_errors import finding_of_error
from finetune_trainer.preflight.model_inspection import ModelInspection
from finetune_trainer.preflight.task import FIELD as MODEL_FIELD

ARGUMENTS = frozenset({"input_ids", "position_ids", "use_cache"})
"""Arguments with which the trainer calls a model."""
OUTPUTS = frozenset({"output_attentions", "output_hidden_states", "return_dict"})
"""Arguments that a transformers decorator may remove from a call before `forward` gets it."""
PEFT_ARGUMENTS = OUTPUTS | {"attention_mask", "inputs_embeds", "labels"}
"""Arguments that PEFT adds to each call."""
STATELESS = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
"""Layer types, as named in configurations, that keep no state. small_model.py measures whether their masks leak."""


def check_wrap_classes(seen: ModelInspection) -> Iterator[Finding]:
    """Reports a class to wrap that does not exist in the model."""
    fsdp = seen.plan.parallelism.fsdp
    if fsdp.auto_wrap_policy is not AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return
    try:
        layer_classes(seen.base, fsdp.transformer_layer_cls_to_wrap)
    except ConfigError as error:
        written = fsdp.transformer_layer_cls_to_wrap
        field, value = CLASSES_FIELD, "unset"
        changes: dict[str, str | list[str] | None] = {POLICY_FIELD: AutoWrapPolicy.NO_WRAP.value}
        if written is not None:
            value = ", ".join(written)
            present = sorted({type(module).__name__ for module in seen.base.modules()})
            near = [difflib.get_close_matches(name, present, n=1, cutoff=0.6) for name in written]
            # If a name resembles no class of the model, the classes that the model itself declares are used.
            changes = {field: list(dict.fromkeys(names[0] for names in near)) if near and all(near) else None}
        yield finding_of_error("wrap-class-unknown", field, value, error, changes=changes)


def check_forward(seen: ModelInspection) -> Iterator[Finding]:
    """Reports a model whose own code does not accept an argument with which it is called. transformers' models accept all."""
    forward = type(seen.base).forward
    accepted = inspect.signature(forward).parameters
    called = ARGUMENTS | (PEFT_ARGUMENTS if seen.plan.method.trains_adapter else set())
    missing = sorted(called - set(accepted) - (OUTPUTS if hasattr(forward, "__wrapped__") else set()))
    # PEFT itself leaves this argument out for MPT.
    if seen.base.config.model_type == "mpt" and "inputs_embeds" in missing:
        missing.remove("inputs_embeds")
    if not missing or any(argument.kind is argument.VAR_KEYWORD for argument in accepted.values()):
        return
    alone = "" if ARGUMENTS & set(missing) else f", or set spec.method.type: {MethodType.FULL.value}, which does without PEFT"
    yield make_finding(
        "forward-without-argument",
        field=MODEL_FIELD,
        value=missing[0],
        message=f"{type(seen.base).__name__}.forward does not accept {', '.join(missing)}, with which it is called",
        fix=f"let forward in the model's own code accept **kwargs, or {', '.join(missing)} with the default None{alone}",
    )


def check_compiler(seen: ModelInspection) -> Iterator[Finding]:
    """Reports a missing compiler. It would also be missing in training, which runs in the same image."""
    plan = seen.plan
    if seen.loaded is None:
        return
    has_gpu = torch.cuda.is_available() if plan.placement is None else plan.placement.gpu_resource_name is not None
    device_type = "cuda" if has_gpu else "cpu"
    missing = missing_compiler(device_type) if plan.training.compile else ()
    if missing:
        yield make_finding(
            "compile-without-compiler",
            field="spec.training.compile",
            value="true",
            message=f"torch.compile for {device_type} calls a compiler ({', '.join(missing)}), and the trainer image has none",
            fix="set spec.training.compile: false, or use a trainer image with a compiler",
            changes={"spec.training.compile": False},
        )


def check_recomputation(seen: ModelInspection) -> Iterator[Finding]:
    """Reports an architecture for which transformers has no activation checkpointing."""
    kind = seen.plan.training.activation_checkpointing
    if kind is ActivationCheckpointing.NONE or seen.base.supports_gradient_checkpointing:
        return
    field = "spec.training.activationCheckpointing"
    yield make_finding(
        "activation-checkpointing-not-supported",
        field=field,
        value=kind.value,
        message=f"{type(seen.base).__name__} of transformers cannot recompute its layers in the backward pass",
        fix=f"set {field}: None",
        changes={field: ActivationCheckpointing.NONE.value},
    )


def check_recurrence(seen: ModelInspection) -> Iterator[Finding]:
    """Refuses packing for models that pass a state from token to token, because no attention mask separates documents there."""
    # transformers marks a class as stateful even if all layers of this model are attention layers (Granite 4 without Mamba).
    kinds = seen.base.config.to_dict().get("layer_types") or ()
    has_state = getattr(seen.base, "_is_stateful", False) and not (kinds and STATELESS.issuperset(kinds))
    if seen.plan.data.packing and has_state:
        yield make_finding(
            "packing-with-recurrent-layers",
            field="spec.data.packing",
            value="true",
            message=f"{type(seen.base).__name__} has recurrent layers, whose state would run on from one record of a sequence "
            "into the next",
            fix="set spec.data.packing: false",
            changes={"spec.data.packing": False},
        )

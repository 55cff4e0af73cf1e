"""What must hold of a model that is trained: asserted in preflight, after wrapping, after the first step and after each save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from torch import nn

from finetune_job.api.method import LoraBias, MethodType
from finetune_job.methods import METHODS
from finetune_job.plan.run_plan import MethodPlan, RunPlan
from finetune_trainer.errors import ConfigError, InvariantError
from finetune_trainer.model.dtypes import resolve_dtypes

MAGNITUDE = "lora_magnitude_vector"
LORA_MARKS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", MAGNITUDE, "trainable_tokens_delta")
SAVED_WHOLE = "modules_to_save"


def trainable_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and global shape of each parameter that is trained. Call before sharding, when shapes are still global."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_trainable(model: nn.Module, plan: RunPlan) -> None:
    """Exactly what the method names is trained. Raises InvariantError."""
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad is not _is_to_be_trained(name, parameter, plan.method)
    ]
    if wrong:
        raise InvariantError(f"method {plan.method.type.value}: wrong parameters are trained or frozen, first: {wrong[:5]}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvariantError(f"method {plan.method.type.value}: no parameter is trained")


def _is_to_be_trained(name: str, parameter: nn.Parameter, method: MethodPlan) -> bool:
    parts = name.split(".")
    if method.type is MethodType.FULL or SAVED_WHOLE in parts:
        return True
    if method.lora is not None:
        if any(mark in parts for mark in LORA_MARKS):
            return True
        return parameter.requires_grad and parts[-1] == "bias" and method.lora.bias is not LoraBias.NONE
    # PEFT marks what a method adds with the method's prefix; some of it is fixed on purpose.
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[PeftType(METHODS[method.type].peft_type)]
    adds_bias = parts[-1] == "bias" and method.adapter is not None and method.adapter.settings.get("bias", "none") != "none"
    return parameter.requires_grad and (adds_bias or any(part.startswith(prefix) for part in parts))


def check_magnitudes(model: nn.Module) -> None:
    """DoRA divides each row of a weight by its norm: a row of zeros, such as that of a padding token, has no direction.

    Raises ConfigError.
    """
    for name, parameter in model.named_parameters():
        if MAGNITUDE in name.split(".") and not bool(parameter.detach().ne(0).all()):
            layer = name.partition(f".{MAGNITUDE}")[0].removeprefix("base_model.model.")
            row = int(parameter.detach().flatten().eq(0).nonzero()[0])
            raise ConfigError(
                f"spec.method.lora.targetModules: the weight of {layer} has a row of zeros (number {row}), which DoRA would divide "
                "by its norm: the loss would be NaN",
                f"name {layer} in method.lora.excludeModules, or use method.type: LoRA",
            )


def check_adapter_bits(plan: RunPlan, stored: torch.dtype) -> None:
    """Under FSDP 1 adapters of other methods than LoRA's family are held like the base, which must then be float32.

    Raises ConfigError.
    """
    load = resolve_dtypes(plan, stored).load
    if plan.method.adapter is not None and load is not torch.float32:
        name = str(load).removeprefix("torch.")
        raise ConfigError(
            f"spec.parallelism.fsdp.version: version 1 would hold adapters of {plan.method.type.value} in {name} like the base, "
            "and small updates vanish in 16 bits",
            "use version 2, or training.precision: fp32",
        )


def check_flat_units(model: nn.Module, unit_names: Collection[str], use_orig_params: bool) -> None:
    """FSDP 1 lays a unit's parameters into one flat one: they need one dtype, and without `use_orig_params` one requires_grad.

    Raises ConfigError.
    """
    held: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        owners = [unit for unit in unit_names if name.startswith(f"{unit}.")]
        held.setdefault(max(owners, key=len, default=""), {})[name] = parameter
    for unit, parameters in held.items():
        shown = unit or "the root unit"
        kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()})
        if len(kinds) > 1:
            raise ConfigError(
                f"spec.parallelism.fsdp: version 1 cannot shard {shown}, whose parameters have several element types: {kinds}",
                "set peftWrapPolicy: true, or method.lora.autocastAdapterDtype: false, or version: 2",
            )
        if not use_orig_params and len({parameter.requires_grad for parameter in parameters.values()}) > 1:
            raise ConfigError(
                f"spec.parallelism.fsdp.useOrigParams: false cannot shard {shown}, which has trained and frozen parameters",
                "set peftWrapPolicy: true, or useOrigParams: true, or version: 2",
            )


def has_learnt(pieces: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Whether some value of a `lora_B`, which starts at zero, is no longer zero among these local pieces."""
    return any("lora_B" in name.split(".") and bool(values.ne(0).any()) for name, values in pieces)


def check_saved(found: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Saved tensors are those expected: names, count, shapes, and every value finite. Raises InvariantError."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise InvariantError(f"saved {len(found)} tensors of {len(expected)}: missing {missing[:5]}, not expected {extra[:5]}")
    for name, tensor in found.items():
        if tuple(tensor.shape) != tuple(expected[name]):
            raise InvariantError(f"saved {name} with shape {tuple(tensor.shape)}, expected {tuple(expected[name])}")
        if not bool(torch.isfinite(tensor).all()):
            raise InvariantError(f"saved {name} has values that are NaN or infinite")

"""What must hold of a model that is trained: asserted in preflight, after wrapping, after the first step and after each save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from finetune_job.api.method import LoraBias, MethodType
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.errors import ConfigError, InvariantError

ADAPTER_MARKS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "modules_to_save")
"""A trainable parameter of an adapter run has one of these as a part of its name, unless it is a bias that the plan trains."""


def trainable_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and global shape of each parameter that is trained. Call before sharding, when shapes are still global."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_trainable(model: nn.Module, plan: RunPlan) -> None:
    """Exactly what the method names is trained. Raises InvariantError."""
    wrong = []
    for name, parameter in model.named_parameters():
        if plan.method.type is MethodType.FULL:
            expected = True
        else:
            expected = any(mark in name.split(".") for mark in ADAPTER_MARKS)
            if not expected and plan.method.lora is not None and plan.method.lora.bias is not LoraBias.NONE:
                expected = parameter.requires_grad and name.split(".")[-1] == "bias"
        if parameter.requires_grad is not expected:
            wrong.append(name)
    if wrong:
        raise InvariantError(f"method {plan.method.type.value}: wrong parameters are trained or frozen, first: {wrong[:5]}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvariantError(f"method {plan.method.type.value}: no parameter is trained")


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

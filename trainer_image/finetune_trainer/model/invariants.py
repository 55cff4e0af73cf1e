"""Checks invariants of a trained model, in preflight, after sharding, after the first step and after saving."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from finetune_job.api.method import LoraBias, MethodType
from finetune_job.methods import INSIDE_PEFT, METHODS
from finetune_job.plan.method_plan import MethodPlan
from finetune_job.plan.run_plan import FsdpPlan, RunPlan
from finetune_job.sharding import Conflict, by_unit, element_types, unit_conflict
from finetune_memory.adapters import FIRST_VALUES
from finetune_trainer.errors import ConfigError, InvariantError
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.packed_weights import is_to_be_packed
from finetune_trainer.model.wrap_plan import held_parameters, unit_names
from finetune_trainer.weights.rounding import dtype_name

MAGNITUDE = "lora_magnitude_vector"
LORA_MARKS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", MAGNITUDE, "trainable_tokens_delta")
_STARTS_AT_ZERO = frozenset({"lora_B", "lora_embedding_A"})
"""Names of the LoRA matrix that starts at zero: A for embeddings, else B (peft.tuners.lora.layer.reset_lora_parameters)."""
SAVED_WHOLE = "modules_to_save"


def trainable_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return each trained parameter's name and global shape. Call this before sharding, which makes shapes local."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_trainable(model: nn.Module, plan: RunPlan, frozen: Collection[str] = ()) -> None:
    """Check that exactly the method's parameters are trained: all but `frozen` for full training. Raises InvariantError."""
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad is not (name not in frozen and _is_to_be_trained(name, parameter, plan.method))
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
            return FIRST_VALUES not in parts
        return parameter.requires_grad and parts[-1] == "bias" and method.lora.bias is not LoraBias.NONE
    # PEFT puts the method's prefix into the names of tensors that it adds; some of these tensors are frozen on purpose.
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[PeftType(METHODS[method.type].peft_type)]
    adds_bias = parts[-1] == "bias" and method.adapter is not None and method.adapter.settings.get("bias", "none") != "none"
    return parameter.requires_grad and (adds_bias or any(part.startswith(prefix) for part in parts))


def check_magnitudes(model: nn.Module) -> None:
    """Refuse weight rows of zeros, such as that of a padding token: DoRA divides each row of a weight by the row's norm.

    A row that holds only rounding errors of B @ A is also refused. Call this before sharding. Layers that are packed later are
    checked when they are packed (check_norms). Raises ConfigError.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or is_to_be_packed(layer.get_base_layer()):
            continue
        for adapter, magnitude in layer.lora_magnitude_vector.items():
            factors = None
            if adapter in layer.lora_A:  # an embedding's are elsewhere, and do not matter, as A starts at zero
                factors = layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach()
            check_norms(name, magnitude.weight.detach().flatten().float(), factors, layer.scaling[adapter])


def check_norms(layer: str, norms: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor] | None, scaling: float) -> None:
    """Check that no row of the sum of a layer's weight and update is zero. norms: the rows' norms, float32 [rows]; factors: A [r,
    columns] and B [rows, r]; None: the update is zero. Raises ConfigError.
    """
    nothing = norms <= (torch.zeros_like(norms) if factors is None else _rounding_of_product(*factors, scaling))
    if bool(nothing.any()):
        message, fix = zero_row(layer.removeprefix(INSIDE_PEFT), "row", int(nothing.nonzero()[0]))
        raise ConfigError(f"spec.method.lora.targetModules: {message}", fix)


def zero_row(layer: str, kind: str, number: int) -> tuple[str, str]:
    """Return the message that DoRA cannot use a layer's weight, and the fix. kind: row or column."""
    message = (
        f"the weight of {layer} has a {kind} of zeros (number {number}), which DoRA would divide by its norm: the loss would be "
        f"NaN, or the {kind} would hold only rounding errors"
    )
    return message, f"name {layer} in method.lora.excludeModules, or use method.type: LoRA, or QLoRA on a packed base"


def _rounding_of_product(a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the largest rounding error of each row of `scaling * B @ A` whose exact value is zero: r * u * |row of B| * |A|.

    The result is float32 [rows]. Bound: Higham 2002, Accuracy and Stability of Numerical Algorithms, eq. 3.13.
    """
    unit = torch.finfo(torch.float32).eps / 2
    bound: torch.Tensor = abs(scaling) * a.shape[0] * unit * b.float().flatten(1).norm(dim=1) * a.float().norm()
    return bound


def check_adapter_bits(plan: RunPlan, stored: torch.dtype) -> None:
    """Check that FSDP 1 holds adapters in float32: unless they are cast, they have the type of the base. Raises ConfigError."""
    load = resolve_dtypes(plan, stored).load
    if plan.method.adapter is not None and not plan.method.adapter.autocast_adapter_dtype and load is not torch.float32:
        name = dtype_name(load)
        raise ConfigError(
            f"spec.parallelism.fsdp.version: version 1 would hold adapters of {plan.method.type.value} in {name} like the base, "
            "and small updates vanish in 16 bits",
            "use version 2, or training.precision: fp32",
        )


def check_flat_units(model: nn.Module, unit_names: Collection[str], fsdp: FsdpPlan) -> None:
    """Check that the parameters of each unit can be joined into the one flat parameter of FSDP 1. Raises ConfigError.

    Units that hold only integers are left to the rule book, which can refuse them from the manifest alone.
    """
    for unit, parameters in by_unit(held_parameters(model), unit_names).items():
        shown = unit or "the root unit"
        match unit_conflict(parameters, fsdp):
            case Conflict.ELEMENT_TYPES:
                kinds = sorted(element_types(parameters))
                raise ConfigError(
                    f"spec.parallelism.fsdp.version: version 1 cannot shard {shown}, whose parameters have several element "
                    f"types: {kinds}",
                    _ways_to_shard(model, fsdp),
                )
            case Conflict.REQUIRES_GRAD:
                raise ConfigError(
                    f"spec.parallelism.fsdp.useOrigParams: false cannot shard {shown}, which has trained and frozen parameters",
                    _ways_to_shard(model, fsdp),
                )


def _ways_to_shard(model: nn.Module, fsdp: FsdpPlan) -> str:
    """Return the fix, which names each single change that removes the conflict from all units."""
    changed = {
        "peftWrapPolicy: true": fsdp.model_copy(update={"peft_wrap_policy": True}),
        "useOrigParams: true": fsdp.model_copy(update={"use_orig_params": True}),
        "version: 2": fsdp.model_copy(update={"version": 2, "peft_wrap_policy": None, "use_orig_params": None}),
    }
    ways = [
        way
        for way, other in changed.items()
        if all(unit_conflict(held, other) is None for held in by_unit(held_parameters(model), unit_names(model, other)).values())
    ]
    return f"set {', or '.join(ways)}" if ways else "train on one rank, or choose another method"


def has_learnt(pieces: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Whether any parameter that started at zero has a value other than zero in its local piece."""
    return any(not _STARTS_AT_ZERO.isdisjoint(name.split(".")) and bool(values.ne(0).any()) for name, values in pieces)


def check_saved(saved: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that saved tensors have the expected names and shapes, and that every value is finite. Raises InvariantError."""
    missing, extra = sorted(set(expected) - set(saved)), sorted(set(saved) - set(expected))
    if missing or extra:
        raise InvariantError(f"saved {len(saved)} tensors of {len(expected)}: missing {missing[:5]}, not expected {extra[:5]}")
    for name, tensor in saved.items():
        if tuple(tensor.shape) != tuple(expected[name]):
            raise InvariantError(f"saved {name} with shape {tuple(tensor.shape)}, expected {tuple(expected[name])}")
        if not bool(torch.isfinite(tensor).all()):
            raise InvariantError(f"saved {name} has values that are NaN or infinite")

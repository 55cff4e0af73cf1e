"""From which size on modules of a twin are units, so that units by size are of the same kinds as those of the model.

A twin of another shape may have no such size, because its modules are not in the same order of size: then the nearest is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from torch import nn

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.plan.run_plan import FsdpPlan, RunPlan
from finetune_trainer.inspection.declared_weights import load_declared, pack
from finetune_trainer.inspection.valueless import attach_valueless
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.load import packed_dtype, stored_dtype
from finetune_trainer.model.wrap_plan import unit_names
from finetune_trainer.small_models.shrink import Change

_FIELD = "parallelism.fsdp.minNumParams"


def with_units_alike(twin: RunPlan, plan: RunPlan, directory: Path, twin_directory: Path, changes: list[Change]) -> RunPlan:
    """The twin's plan with a `minNumParams` for its sizes, noted in `changes`; both models are looked at without their weights."""
    fsdp = plan.parallelism.fsdp
    if fsdp.auto_wrap_policy is not AutoWrapPolicy.SIZE_BASED_WRAP or twin.parallelism.world_size == 1:
        return twin
    wanted = kinds(unit_names(trained_without_weights(plan, directory), _by_size(fsdp)))
    minimum, found = nearest_minimum(trained_without_weights(twin, twin_directory), wanted, fsdp)
    changes.append(Change(_FIELD, fsdp.min_num_params or "the default", minimum))
    if found != wanted:
        changes.append(Change("units by size that differ", sorted(wanted - found), sorted(found - wanted)))
    sharded = twin.parallelism.model_copy(update={"fsdp": twin.parallelism.fsdp.model_copy(update={"min_num_params": minimum})})
    return twin.model_copy(update={"parallelism": sharded})


def nearest_minimum(model: nn.Module, wanted: Collection[str], fsdp: FsdpPlan) -> tuple[int, set[str]]:
    """The least size with the fewest kinds of units too many or too few, and the kinds that it gives."""
    candidates = [(minimum, kinds(units)) for minimum, units in _choices(model, fsdp)]
    return min(candidates, key=lambda candidate: len(candidate[1] ^ set(wanted)))


def kinds(units: Collection[str]) -> set[str]:
    """Names of units without the numbers of layers and experts."""
    return {".".join(part for part in name.split(".") if not part.isdigit()) for name in units}


def _choices(model: nn.Module, fsdp: FsdpPlan) -> Iterator[tuple[int, list[str]]]:
    """Every choice of units that some size gives, with the least such size, up to none at all."""
    minimum = 1
    while True:
        units = unit_names(model, _by_size(fsdp, minimum))
        yield minimum, units
        if not units:
            return
        # The same units are chosen until the smallest of them is too small.
        minimum = min(_held_alone(model, units).values()) + 1


def _held_alone(model: nn.Module, units: Collection[str]) -> dict[str, int]:
    """Numbers of parameters of each unit that no unit below it holds."""
    counts = {}
    for unit in units:
        below = [model.get_submodule(other) for other in units if other.startswith(f"{unit}.")]
        held = {id(parameter) for module in below for parameter in module.parameters()}
        counts[unit] = sum(parameter.numel() for parameter in model.get_submodule(unit).parameters() if id(parameter) not in held)
    return counts


def _by_size(fsdp: FsdpPlan, minimum: int | None = None) -> FsdpPlan:
    """Without trainable leaves, which are units whatever their size."""
    minimum = fsdp.min_num_params if minimum is None else minimum
    return fsdp.model_copy(update={"min_num_params": minimum, "peft_wrap_policy": False})


def trained_without_weights(plan: RunPlan, directory: Path) -> nn.Module:
    """The model that ranks would shard, on the meta device."""
    model: nn.Module
    model, _ = load_declared(plan, directory)
    if plan.method.quantization is not None:
        pack(model, plan.method.quantization, packed_dtype(plan, resolve_dtypes(plan, stored_dtype(directory))))
    return attach_valueless(model, plan, directory) if plan.method.trains_adapter else model

"""How FSDP cuts a model: units, what a rank keeps of each parameter, and what it holds in addition during a step.

Version 2 cuts every parameter along its first dimension and pads each shard to the largest
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Version 1 lays the parameters of a unit into one flat one and cuts that;
if original parameters are kept, each begins at a multiple of 16 bytes (torch/distributed/fsdp/_flat_param.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.plan.element_types import VALUE_BYTES, Elements
from finetune_job.plan.run_plan import FsdpPlan
from finetune_job.sharding import (
    DEFAULT_MIN_NUM_PARAMS,
    INTEGERS,
    by_unit,
    deepest_first,
    is_one_flat_parameter,
    large_modules,
)
from finetune_memory.model_shape import ModelShape, ParameterShape

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together."""

    name: str
    """Empty: the root."""
    parameters: tuple[ParameterShape, ...]

    @property
    def is_trained(self) -> bool:
        """Whether some of it is."""
        return any(each.is_trained for each in self.parameters)

    def frozen(self) -> Unit:
        """Without what is trained."""
        return Unit(self.name, tuple(each for each in self.parameters if not each.is_trained))

    def gathered_bytes(self, param_dtype: str | None) -> int:
        """All of it, in the element type of the computation; packed values are never cast."""
        return sum(
            each.numel * VALUE_BYTES[each.dtype if param_dtype is None or each.dtype in INTEGERS else param_dtype]
            for each in self.parameters
        )


@dataclass(frozen=True)
class Shards:
    """Bytes that one rank keeps."""

    frozen: int
    trained: int
    trained_elements: int
    """Values that this rank's optimizer knows, padding left out."""
    gradients: int
    """Reduced gradients of trained parameters."""
    trained_tensors: int
    """Parameters that this rank's optimizer knows."""


def units_of(shape: ModelShape) -> tuple[Unit, ...]:
    """Each parameter in the innermost unit that holds it; the root comes last."""
    held = by_unit(shape.parameters, shape.units)
    return tuple(Unit(name, tuple(held[name])) for name in (*shape.units, "") if name in held)


def unit_names(parameters: Sequence[ParameterShape], fsdp: FsdpPlan, layers: Sequence[str]) -> tuple[str, ...]:
    """Units by the plan's policy, children before parents. `layers`: names of the model's layers, units by default."""
    if fsdp.auto_wrap_policy is AutoWrapPolicy.NO_WRAP:
        chosen: list[str] = []
    elif fsdp.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        sizes = ((each.name, each.numel) for each in parameters)
        chosen = large_modules(sizes, fsdp.min_num_params or DEFAULT_MIN_NUM_PARAMS, _is_list)
    else:
        chosen = list(layers)
    if fsdp.peft_wrap_policy:
        # PEFT's rule: leaf modules whose weight is trained.
        leaves = dict.fromkeys(each.module for each in parameters if each.is_trained and each.name.endswith(".weight"))
        chosen += [name for name in leaves if name not in chosen]
    return tuple(sorted(chosen, key=deepest_first))


def _is_list(name: str, modules: Collection[str]) -> bool:
    """Whether a module is a list of layers, which has no forward pass of its own."""
    return f"{name}.0" in modules


def shards(
    units: Sequence[Unit],
    fsdp: FsdpPlan,
    world_size: int,
    rank: int = 0,
    param_dtype: str | None = None,
    *,
    is_replicated: bool = False,
) -> Shards:
    """What `rank` keeps of these units. No other keeps more than the first. is_replicated: each keeps all that is trained."""
    if world_size > 1 and is_replicated:
        whole = shards(units, fsdp, 1)
        return replace(whole, frozen=shards(units, fsdp, world_size, rank, param_dtype).frozen)
    if world_size == 1:
        every = [each for unit in units for each in unit.parameters]
        trained = [each for each in every if each.is_trained]
        size = sum(each.num_bytes for each in trained)
        return Shards(
            frozen=sum(each.num_bytes for each in every) - size,
            trained=size,
            trained_elements=sum(each.num_bytes for each in trained),
            gradients=size,
            trained_tensors=len(trained),
        )
    parts = [
        _flat(unit, fsdp, world_size, rank, param_dtype) if fsdp.version == 1 else _rows(unit, world_size, rank) for unit in units
    ]
    return Shards(
        frozen=sum(part.frozen for part in parts),
        trained=sum(part.trained for part in parts),
        trained_elements=sum(part.trained_elements for part in parts),
        gradients=sum(part.gradients for part in parts),
        trained_tensors=sum(part.trained_tensors for part in parts),
    )


def _rows(unit: Unit, world_size: int, rank: int) -> Shards:
    frozen = trained = own = 0
    for each in unit.parameters:
        rows, row_bytes = each.shape[0], each.num_bytes // max(each.shape[0], 1)
        padded = -(-rows // world_size)
        if each.is_trained:
            trained += padded * row_bytes
            own += max(min(rows - rank * padded, padded), 0) * row_bytes
        else:
            frozen += padded * row_bytes
    return Shards(frozen, trained, own, trained, sum(each.is_trained for each in unit.parameters))


def _flat(unit: Unit, fsdp: FsdpPlan, world_size: int, rank: int, param_dtype: str | None) -> Shards:
    width = VALUE_BYTES[unit.parameters[0].dtype]
    total, places = _flat_layout(unit, fsdp, world_size, param_dtype)
    shard = -(-total // world_size)
    size = shard * width
    if not unit.is_trained:
        return Shards(size, 0, 0, 0, 0)
    if is_one_flat_parameter(fsdp):
        return Shards(0, size, size, size, 1)
    start, stop = rank * shard, (rank + 1) * shard
    own = trained = tensors = 0
    for each, place in zip(unit.parameters, places, strict=True):
        part = max(min(place + each.numel, stop) - max(place, start), 0)
        trained += each.numel if each.is_trained else 0
        own += part if each.is_trained else 0
        tensors += each.is_trained
    kept = min(own * width, size)
    # One flat gradient covers frozen parameters, too.
    return Shards(size - kept, kept, own * width, size, tensors)


def _flat_layout(unit: Unit, fsdp: FsdpPlan, world_size: int, param_dtype: str | None) -> tuple[int, list[int]]:
    """Values of the flat parameter, padding included, and where each parameter begins."""
    if is_one_flat_parameter(fsdp):
        places, total = [], 0
        for each in unit.parameters:
            places.append(total)
            total += each.numel
        return total, places
    aligned = ALIGNMENT_BYTES // VALUE_BYTES[param_dtype or unit.parameters[0].dtype]
    total, places = 0, []
    for each in unit.parameters:
        total += -total % aligned
        places.append(total)
        total += each.numel
    return total + -total % world_size, places


def gathered_bytes(units: Sequence[Unit], fsdp: FsdpPlan, elements: Elements) -> int:
    """Whole parameters at the fullest moment, which are never sharded in between for the root.

    Of the other units one is in use, with the buffer that it was gathered into, and the next one is being gathered
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: `unshard` is issued one unit ahead, and a buffer goes when the next
    one is copied out). With `reshardAfterForward: false` all of them stay, and no second copy of any is needed but of one.
    """
    sizes = [unit.gathered_bytes(elements.param) for unit in units]
    root = sizes[-1] if units and not units[-1].name else 0
    others = sizes[:-1] if root else sizes
    if not others:
        return 2 * root
    if fsdp.reshard_after_forward is False:
        return root + sum(others) + max(*others, root)
    if fsdp.version == 1:
        # One flat parameter in use and one that is gathered ahead; views need no copies.
        return root + 2 * max(others)
    return max(root + 3 * max(others), 2 * root + max(others))


def reduced_bytes(units: Sequence[Unit], elements: Elements) -> int:
    """Gradients of the largest unit: whole, in the element type of the computation, and laid out in that of the reduction."""
    found = 0
    for unit in units:
        whole = copied = 0
        for each in unit.parameters:
            if each.is_trained:
                whole += each.numel * VALUE_BYTES[elements.param or each.dtype]
                copied += each.numel * VALUE_BYTES[elements.reduce or elements.param or each.dtype]
        found = max(found, whole + copied)
    return found

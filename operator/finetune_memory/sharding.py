"""How FSDP cuts a model: units, what a rank keeps of each parameter, and what it holds in addition during a step.

Version 2 cuts every parameter along its first dimension and pads each shard to the largest
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Version 1 joins the parameters of a unit into one flat parameter and cuts
that; if original parameters are kept, each begins at a multiple of 16 bytes (torch/distributed/fsdp/_flat_param.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.plan.element_types import VALUE_BYTES, Elements
from finetune_job.plan.run_plan import FsdpPlan
from finetune_job.sharding import DEFAULT_MIN_NUM_PARAMS, INTEGERS, by_unit, deepest_first, is_one_flat_parameter, large_modules
from finetune_memory.model_shape import ModelShape, ParameterShape

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Unit:
    """An FSDP unit: parameters that are gathered together."""

    name: str
    """Name of the unit's module; empty for the root."""
    parameters: tuple[ParameterShape, ...]

    @property
    def is_trained(self) -> bool:
        """Whether any parameter of the unit is trained."""
        return any(parameter.is_trained for parameter in self.parameters)

    def frozen(self) -> Unit:
        """Return the unit without its trained parameters."""
        return Unit(self.name, tuple(parameter for parameter in self.parameters if not parameter.is_trained))

    def gathered_bytes(self, param_dtype: str | None) -> int:
        """Count the bytes of the whole unit in the element type of the computation; packed values are never cast."""
        return sum(
            parameter.numel * VALUE_BYTES[parameter.dtype if param_dtype is None or parameter.dtype in INTEGERS else param_dtype]
            for parameter in self.parameters
        )


@dataclass(frozen=True)
class Shards:
    """Bytes that one rank keeps."""

    frozen: int
    trained: int
    trained_elements: int
    """Bytes of the values that this rank's optimizer updates, without padding."""
    gradients: int
    """Bytes of reduced gradients of trained parameters."""
    trained_tensors: int
    """Number of parameters that this rank's optimizer updates."""


def units_of(shape: ModelShape) -> tuple[Unit, ...]:
    """Put each parameter into the innermost unit that holds it; the root comes last."""
    parameters_of = by_unit(shape.parameters, shape.units)
    return tuple(Unit(name, tuple(parameters_of[name])) for name in (*shape.units, "") if name in parameters_of)


def unit_names(parameters: Sequence[ParameterShape], fsdp: FsdpPlan, layers: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the units by the plan's policy, children before parents. layers: the layers, the default units."""
    if fsdp.auto_wrap_policy is AutoWrapPolicy.NO_WRAP:
        chosen: list[str] = []
    elif fsdp.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        sizes = ((parameter.name, parameter.numel) for parameter in parameters)
        least = fsdp.min_num_params or DEFAULT_MIN_NUM_PARAMS
        # A list of layers has no forward pass of its own, so it cannot be a unit.
        chosen = large_modules(sizes, least, lambda name, modules: f"{name}.0" in modules)
    else:
        chosen = list(layers)
    if fsdp.peft_wrap_policy:
        # PEFT's rule: each leaf module whose weight is trained is a unit.
        leaves = dict.fromkeys(
            parameter.module for parameter in parameters if parameter.is_trained and parameter.name.endswith(".weight")
        )
        chosen += [name for name in leaves if name not in chosen]
    return tuple(sorted(chosen, key=deepest_first))


def shards(
    units: Sequence[Unit],
    fsdp: FsdpPlan,
    world_size: int,
    rank: int = 0,
    param_dtype: str | None = None,
    *,
    is_replicated: bool = False,
) -> Shards:
    """Count what `rank` keeps of these units; rank 0 keeps the most. is_replicated: each rank keeps all trained parameters."""
    if world_size > 1 and is_replicated:
        whole = shards(units, fsdp, 1)
        return replace(whole, frozen=shards(units, fsdp, world_size, rank, param_dtype).frozen)
    is_flat = world_size > 1 and fsdp.version == 1
    parts = [_flat(unit, fsdp, world_size, rank, param_dtype) if is_flat else _rows(unit, world_size, rank) for unit in units]
    return Shards(*map(sum, zip(*map(astuple, parts), strict=True))) if parts else Shards(0, 0, 0, 0, 0)


def _rows(unit: Unit, world_size: int, rank: int) -> Shards:
    frozen = trained = own = 0
    for parameter in unit.parameters:
        rows = parameter.shape[0] if parameter.shape else 1
        row_bytes, padded = parameter.num_bytes // max(rows, 1), -(-rows // world_size)
        if parameter.is_trained:
            trained += padded * row_bytes
            own += max(min(rows - rank * padded, padded), 0) * row_bytes
        else:
            frozen += padded * row_bytes
    return Shards(frozen, trained, own, trained, sum(parameter.is_trained for parameter in unit.parameters))


def _flat(unit: Unit, fsdp: FsdpPlan, world_size: int, rank: int, param_dtype: str | None) -> Shards:
    width = VALUE_BYTES[unit.parameters[0].dtype]
    # If original parameters are kept, each begins at a multiple of this many values.
    aligned = 1 if is_one_flat_parameter(fsdp) else ALIGNMENT_BYTES // VALUE_BYTES[param_dtype or unit.parameters[0].dtype]
    total, places = 0, []
    for parameter in unit.parameters:
        total += -total % aligned
        places.append(total)
        total += parameter.numel
    shard = -(-total // world_size)
    size = shard * width
    if not unit.is_trained:
        return Shards(size, 0, 0, 0, 0)
    if is_one_flat_parameter(fsdp):
        return Shards(0, size, size, size, 1)
    start, stop = rank * shard, (rank + 1) * shard
    trained = [(parameter, place) for parameter, place in zip(unit.parameters, places, strict=True) if parameter.is_trained]
    own = sum(max(min(place + parameter.numel, stop) - max(place, start), 0) for parameter, place in trained) * width
    # The gradient of a flat parameter also covers frozen parameters.
    return Shards(size - own, own, own, size, len(trained))


def gathered_bytes(units: Sequence[Unit], fsdp: FsdpPlan, elements: Elements) -> int:
    """Count the bytes of gathered parameters at their peak; the root stays gathered all the time.

    Of the other units, one is in use, with the buffer into which it was gathered, and the next one is being gathered
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: `unshard` is issued one unit ahead, and a buffer is freed when the
    next one is copied out). With `reshardAfterForward: false` all units stay gathered, and only one is copied a second time.
    """
    sizes = [unit.gathered_bytes(elements.param) for unit in units]
    root = sizes[-1] if units and not units[-1].name else 0
    others = sizes[:-1] if root else sizes
    if not others:
        return 2 * root
    if fsdp.reshard_after_forward is False:
        return root + sum(others) + max(*others, root)
    if fsdp.version == 1:
        # One flat parameter is in use, and one is being gathered ahead; views need no copies.
        return root + 2 * max(others)
    return max(root + 3 * max(others), 2 * root + max(others))


def reduced_bytes(units: Sequence[Unit], elements: Elements) -> int:
    """Count the bytes of the largest unit's gradients: whole, and copied into the element type of the reduction."""

    def both(parameter: ParameterShape) -> int:
        whole, copied = elements.param or parameter.dtype, elements.reduce or elements.param or parameter.dtype
        return parameter.numel * (VALUE_BYTES[whole] + VALUE_BYTES[copied])

    sizes = (sum(both(parameter) for parameter in unit.parameters if parameter.is_trained) for unit in units)
    return max(sizes, default=0)

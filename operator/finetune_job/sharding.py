"""The rules of sharding, on plain data: which parameters FSDP can hold in one unit, and what follows for adapters.

Version 1 joins the parameters of a unit into one flat parameter (torch/distributed/fsdp/_flat_param.py, _init_metadata). The flat
parameter has one element type, not an integer type. With `useOrigParams: false`, autograd and the optimizer see it as a whole:
trained or frozen, with one learning rate and one weight decay. With original parameters they see each part, but all parts share
one gradient. Version 2 shards each parameter separately, but reduces the gradients of a unit together, in one element type.

A parameter belongs to the innermost unit around it. So an adapter shares the unit of its layer unless they are separated: by
PEFT's wrap policy, if the trained modules are leaves with a weight, or by a policy whose units may be just as small.

Rules, plan, memory planner, preflight and trainer call this module and write their own messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from finetune_job.api.method import MethodType
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.methods import METHODS, Family

INTEGERS = frozenset({"uint8", "int8"})
"""Element types of quantised weights that FSDP 1 cannot flatten."""
SHARDED_BITS = 4
"""The only number of bits of a quantised base that can be sharded over several ranks."""
LEAF_CLASSES = ("Linear", "Linear4bit")
"""Classes of an adapter's modules and of the layers that they adapt; a plan may name these classes as units."""
DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""Default minimum size of a unit of SIZE_BASED_WRAP, in parameters; the same as torch's default."""


def can_load_shards(method: MethodType, bits: int | None, *, has_remote_code: bool) -> bool:
    """Whether each rank may read just its own shards of the base from disk, as far as a job's settings determine this.

    bits: number of bits of a quantised base. The content of the model's files may also rule it out (model/load_shards.py).
    """
    return bits in {None, SHARDED_BITS} and not has_remote_code and not METHODS[method].attaches_to_values


class Parameter(Protocol):
    """The properties of a parameter on which the sharding rules depend."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """Element type in which the parameter is held, under torch's name."""

    @property
    def is_trained(self) -> bool: ...


_P = TypeVar("_P", bound=Parameter)


@dataclass(frozen=True)
class HeldParameter:
    """A stand-in for a parameter, with only the properties on which the sharding rules depend."""

    name: str
    dtype: str
    is_trained: bool


class Fsdp(Protocol):
    """The fields of `parallelism.fsdp` in a plan that matter here."""

    @property
    def version(self) -> int: ...
    @property
    def auto_wrap_policy(self) -> AutoWrapPolicy: ...
    @property
    def transformer_layer_cls_to_wrap(self) -> Sequence[str] | None: ...
    @property
    def peft_wrap_policy(self) -> bool | None: ...
    @property
    def use_orig_params(self) -> bool | None: ...
    @property
    def offload_params(self) -> bool: ...


class Conflict(Enum):
    """Why the parameters of a unit cannot be sharded together."""

    ELEMENT_TYPES = "version 1: they have several element types"
    INTEGERS = "version 1: they are integers"
    REQUIRES_GRAD = "version 1 without original parameters: some are trained and some are frozen"
    TRAINED_TYPES = "version 2: those that are trained have several element types"


def innermost_unit(parameter: str, units: Collection[str]) -> str:
    """Return the name of the unit that holds a parameter; empty for the root. units: module names; pass a set for speed."""
    module = parameter.rpartition(".")[0]
    while module and module not in units:
        module = module.rpartition(".")[0]
    return module


def by_unit(parameters: Iterable[_P], units: Iterable[str]) -> dict[str, list[_P]]:
    """Group parameters by the name of their unit. The root's name is empty; units without parameters are left out."""
    names = frozenset(units)
    groups: dict[str, list[_P]] = {}
    for parameter in parameters:
        groups.setdefault(innermost_unit(parameter.name, names), []).append(parameter)
    return groups


def element_types(parameters: Iterable[Parameter]) -> dict[str, str]:
    """Return the parameters' element types, each with the name of the first parameter of that type."""
    names: dict[str, str] = {}
    for parameter in parameters:
        names.setdefault(parameter.dtype, parameter.name)
    return names


def is_one_flat_parameter(fsdp: Fsdp) -> bool:
    """Whether autograd and the optimizer see each unit as a single parameter, which is trained or frozen as a whole."""
    return fsdp.version == 1 and not fsdp.use_orig_params


def unit_conflict(parameters: Collection[Parameter], fsdp: Fsdp) -> Conflict | None:
    """Return why these parameters cannot share a unit; None if they can."""
    if fsdp.version == 2:
        return Conflict.TRAINED_TYPES if len(element_types(trained for trained in parameters if trained.is_trained)) > 1 else None
    kinds = element_types(parameters)
    if len(kinds) > 1:
        return Conflict.ELEMENT_TYPES
    if not INTEGERS.isdisjoint(kinds):
        return Conflict.INTEGERS
    if is_one_flat_parameter(fsdp) and len({parameter.is_trained for parameter in parameters}) > 1:
        return Conflict.REQUIRES_GRAD
    return None


def may_separate_adapters(fsdp: Fsdp) -> bool:
    """Whether units may be so small, depending on the model, that they separate adapters and base without PEFT's wrap policy."""
    if fsdp.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return not set(LEAF_CLASSES).isdisjoint(fsdp.transformer_layer_cls_to_wrap or ())
    return fsdp.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP


def adapter_conflict(method: MethodType, fsdp: Fsdp, base: str, adapter: str) -> Conflict | None:
    """Return why one unit cannot hold a layer's base weights and its adapter, given their element types; None if it can."""
    if may_separate_adapters(fsdp) or (fsdp.peft_wrap_policy and METHODS[method].needs.trains_leaves):
        return None
    return unit_conflict((HeldParameter("base", base, False), HeldParameter("adapter", adapter, True)), fsdp)


def reads_sharded_weights(method: MethodType, fsdp: Fsdp) -> bool:
    """Whether layers would read adapter weights while these are one-dimensional shards, in units of their own."""
    is_cut = fsdp.version == 1 and bool(fsdp.use_orig_params and fsdp.peft_wrap_policy)
    return is_cut and METHODS[method].needs.reads_adapters_outside_units


def needs_own_units(method: MethodType, version: int, *, use_orig_params: bool | None, trains_rows: bool) -> bool:
    """Whether adapters need PEFT's wrap policy. use_orig_params: None if the user has not set it. trains_rows: whether single
    rows of an embedding are trained.

    FSDP 1 cannot flatten float32 adapters with a 16-bit base or, without original parameters, trained with frozen parameters.
    Outside LoRA's family most adapters are not leaf modules, so there the policy is never the default.
    """
    if version != 1 or METHODS[method].family is not Family.LORA:
        return False
    needs_original = bool(use_orig_params or trains_rows)
    return not (needs_original and METHODS[method].needs.reads_adapters_outside_units)


def needs_original_parameters(*, own_units: bool | None, trains_rows: bool) -> bool:
    """Whether FSDP 1 needs `useOrigParams`, because trained and frozen parameters share a unit, as with rows of an embedding."""
    return not own_units or trains_rows


def holds_adapters_as_the_base(method: MethodType, version: int, *, own_units: bool) -> bool:
    """Whether adapters are held in the base's element type, as they are under FSDP 1 unless they have units of their own.

    Magnitudes are an exception: 16 bits would round their updates away, so such a manifest is refused instead.
    """
    entry = METHODS[method]
    return version == 1 and entry.family is not Family.FULL and not entry.needs.magnitudes and not own_units


def reduces_every_micro_step(fsdp: Fsdp, *, is_sharded: bool, trains_adapter: bool) -> bool:
    """Whether gradients are summed over ranks after each micro-step. Otherwise every rank holds whole, unsharded gradients until
    the last micro-step: these are small for adapters, but else as large as the model.

    With original parameters, FSDP 1 holds one gradient for all parameters of a unit, frozen or trained. With offloaded
    parameters, it would lose what earlier micro-steps have reduced (see torch's documentation of CPUOffload), so it must wait.
    """
    if not is_sharded or fsdp.version == 2:
        return not trains_adapter
    return not fsdp.offload_params and (not trains_adapter or bool(fsdp.use_orig_params))


@dataclass(frozen=True)
class Casts:
    """The element types to which FSDP and autocast cast for the computation, by torch's names; None for no cast."""

    by_fsdp: str | None
    """Type to which FSDP casts a unit's gathered parameters and, under version 2, also the unit's inputs and outputs."""
    by_autocast: str | None
    """Type to which autocast casts the operands of products."""


def casts(method: MethodType, version: int, world_size: int, computed: str | None) -> Casts:
    """Return what casts to `computed`, the element type of the computation: FSDP, autocast or both."""
    needs = METHODS[method].needs
    if world_size == 1:
        return Casts(None, computed)
    if version == 2:
        return Casts(computed, computed if needs.computes_with_buffers else None)
    # Version 1 casts a unit's parameters, but not the output of a float32 adapter: under PEFT's policy the adapter's leaves are
    # separate units, and their output is added to that of the base within one layer.
    is_left = needs.leaves_casts_to_autocast and computed != "float32"
    return Casts(None if is_left else computed, computed)


ORDERED_VALUES_AT_ONCE = 1 << 20
"""Number of float32 gradient values per virtual rank that an ordered reduction exchanges at a time."""


def large_modules(
    parameters: Iterable[tuple[str, int]], minimum: int, cannot_be_unit: Callable[[str, Collection[str]], bool]
) -> list[str]:
    """List the units of SIZE_BASED_WRAP, deepest first: modules of at least `minimum` parameters outside inner units.

    parameters: each one's name and number of values. cannot_be_unit: takes a module's name and all modules' names.
    """
    sizes: dict[str, int] = {}
    for parameter, size in parameters:
        for module in _ancestors(parameter):
            sizes[module] = sizes.get(module, 0) + size
    chosen = []
    for name in sorted(sizes, key=deepest_first):
        if sizes[name] < minimum or cannot_be_unit(name, sizes):
            continue
        chosen.append(name)
        for module in _ancestors(name):
            sizes[module] -= sizes[name]
    return chosen


def deepest_first(module: str) -> tuple[int, str]:
    """Return a sort key that puts units before the units around them, which is the order in which FSDP has to wrap them."""
    return -module.count("."), module


def _ancestors(name: str) -> Iterable[str]:
    while name := name.rpartition(".")[0]:
        yield name

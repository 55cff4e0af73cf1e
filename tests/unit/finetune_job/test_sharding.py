"""The law of sharding, as tables of cases: what FSDP can hold in one unit, and what that asks of a method's adapters."""

from typing import Any

import pytest

from finetune_job.api.method import MethodType as M
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.plan.run_plan import FsdpPlan
from finetune_job.sharding import (
    Casts,
    Conflict,
    HeldParameter,
    adapter_conflict,
    by_unit,
    can_load_shards,
    casts,
    element_types,
    holds_adapters_as_the_base,
    innermost_unit,
    is_one_flat_parameter,
    large_modules,
    may_separate_adapters,
    needs_original_parameters,
    needs_own_units,
    reads_sharded_weights,
    reduces_every_micro_step,
    unit_conflict,
)

BF16, F16, F32, U8, I8 = "bfloat16", "float16", "float32", "uint8", "int8"


def fsdp(version: int, **fields: Any) -> FsdpPlan:
    """Version 1 with the values of its fields if the user leaves them open without an adapter, or version 2."""
    first = {"peft_wrap_policy": False, "use_orig_params": True, "sync_module_states": True, "reshard_after_forward": None}
    second = {"peft_wrap_policy": None, "use_orig_params": None, "sync_module_states": None, "reshard_after_forward": True}
    common = {
        "auto_wrap_policy": AutoWrapPolicy.TRANSFORMER_BASED_WRAP, "transformer_layer_cls_to_wrap": None, "min_num_params": None,
        "offload_params": False, "param_dtype": None, "reduce_dtype": None,
    }  # fmt: skip
    return FsdpPlan(version=version, **{**common, **(first if version == 1 else second), **fields})


ORIGINAL, FLAT, SECOND = fsdp(1), fsdp(1, use_orig_params=False), fsdp(2)
LEAVES = fsdp(1, use_orig_params=False, peft_wrap_policy=True)
LEAVES_ORIGINAL = fsdp(1, peft_wrap_policy=True)
BY_SIZE = fsdp(1, use_orig_params=False, auto_wrap_policy=AutoWrapPolicy.SIZE_BASED_WRAP)
NO_WRAP = fsdp(1, use_orig_params=False, auto_wrap_policy=AutoWrapPolicy.NO_WRAP)
LINEAR = fsdp(1, use_orig_params=False, transformer_layer_cls_to_wrap=("LlamaDecoderLayer", "Linear"))
PACKED_LINEAR = fsdp(1, use_orig_params=False, transformer_layer_cls_to_wrap=("Linear4bit",))
LAYERS = fsdp(1, use_orig_params=False, transformer_layer_cls_to_wrap=("LlamaDecoderLayer",))


def frozen(dtype: str) -> HeldParameter:
    return HeldParameter("layer.weight", dtype, is_trained=False)


def trained(dtype: str) -> HeldParameter:
    return HeldParameter("layer.lora_A.weight", dtype, is_trained=True)


@pytest.mark.parametrize(
    ("unit", "original", "flat", "second"),
    [
        # What is in the unit; what is wrong under version 1 with original parameters, without them, and under version 2.
        ((), None, None, None),
        ((frozen(BF16),), None, None, None),
        ((trained(F32),), None, None, None),
        ((frozen(BF16), frozen(BF16)), None, None, None),
        ((trained(F32), trained(F32)), None, None, None),
        ((frozen(F32), trained(F32)), None, Conflict.REQUIRES_GRAD, None),
        ((trained(BF16), frozen(BF16)), None, Conflict.REQUIRES_GRAD, None),
        ((frozen(BF16), trained(F32)), Conflict.ELEMENT_TYPES, Conflict.ELEMENT_TYPES, None),
        ((frozen(BF16), frozen(F16)), Conflict.ELEMENT_TYPES, Conflict.ELEMENT_TYPES, None),
        ((trained(BF16), trained(F32)), Conflict.ELEMENT_TYPES, Conflict.ELEMENT_TYPES, Conflict.TRAINED_TYPES),
        ((frozen(F32), trained(BF16), trained(F32)), Conflict.ELEMENT_TYPES, Conflict.ELEMENT_TYPES, Conflict.TRAINED_TYPES),
        ((frozen(U8),), Conflict.INTEGERS, Conflict.INTEGERS, None),
        ((frozen(I8), frozen(I8)), Conflict.INTEGERS, Conflict.INTEGERS, None),
        ((frozen(U8), frozen(BF16)), Conflict.ELEMENT_TYPES, Conflict.ELEMENT_TYPES, None),
    ],
)
def test_what_may_share_a_unit(
    unit: tuple[HeldParameter, ...], original: Conflict | None, flat: Conflict | None, second: Conflict | None
) -> None:
    assert (unit_conflict(unit, ORIGINAL), unit_conflict(unit, FLAT), unit_conflict(unit, SECOND)) == (original, flat, second)


@pytest.mark.parametrize(
    ("plan", "whole", "parts"),
    [
        # Whether a unit is one parameter for the optimizer, and whether the policy may part adapters from their layers.
        (ORIGINAL, False, False),
        (FLAT, True, False),
        (LAYERS, True, False),
        (NO_WRAP, True, False),
        (LINEAR, True, True),
        (PACKED_LINEAR, True, True),
        (BY_SIZE, True, True),
        (SECOND, False, False),
        (fsdp(2, auto_wrap_policy=AutoWrapPolicy.SIZE_BASED_WRAP), False, True),
        # Classes that this policy does not look at.
        (fsdp(1, auto_wrap_policy=AutoWrapPolicy.NO_WRAP, transformer_layer_cls_to_wrap=("Linear",)), False, False),
    ],
)
def test_what_a_policy_does(plan: FsdpPlan, whole: bool, parts: bool) -> None:
    assert (is_one_flat_parameter(plan), may_separate_adapters(plan)) == (whole, parts)


MIXED, TYPES = Conflict.REQUIRES_GRAD, Conflict.ELEMENT_TYPES


@pytest.mark.parametrize(
    ("method", "plan", "same", "wide"),
    [
        # What is wrong with adapters in the base's element type, and with float32 ones on a base of 16 bits.
        (M.LORA, ORIGINAL, None, TYPES),
        (M.LORA, FLAT, MIXED, TYPES),
        (M.LORA, LAYERS, MIXED, TYPES),
        (M.LORA, NO_WRAP, MIXED, TYPES),
        (M.LORA, LEAVES, None, None),
        (M.LORA, LEAVES_ORIGINAL, None, None),
        (M.LORA, LINEAR, None, None),
        (M.LORA, BY_SIZE, None, None),
        (M.LORA, SECOND, None, None),
        (M.QLORA, FLAT, MIXED, TYPES),
        (M.QLORA, PACKED_LINEAR, None, None),
        (M.DORA, FLAT, MIXED, TYPES),
        (M.DORA, LEAVES, None, None),
        # Parameters of a layer itself stay in its unit, whatever PEFT's policy does.
        (M.LOHA, LEAVES, MIXED, TYPES),
        (M.LOHA, LEAVES_ORIGINAL, None, TYPES),
        (M.LOHA, ORIGINAL, None, TYPES),
        (M.LOHA, BY_SIZE, None, None),
        (M.IA3, LEAVES, MIXED, TYPES),
        # Leaf modules with a weight.
        (M.OFT, FLAT, MIXED, TYPES),
        (M.OFT, LEAVES, None, None),
        (M.LN_TUNING, LEAVES, None, None),
    ],
)
def test_what_adapters_meet_in_their_layers_unit(method: M, plan: FsdpPlan, same: Conflict | None, wide: Conflict | None) -> None:
    assert adapter_conflict(method, plan, BF16, BF16) is same
    assert adapter_conflict(method, plan, BF16, F32) is wide


@pytest.mark.parametrize(
    ("method", "version", "use_orig_params", "trains_rows", "needs"),
    [
        (M.LORA, 1, None, False, True),
        (M.LORA, 1, True, False, True),
        (M.LORA, 1, False, True, True),
        (M.QLORA, 1, None, True, True),
        (M.DORA, 1, None, False, True),
        (M.DORA, 1, False, False, True),
        # DoRA cannot read its adapters in units with original parameters, which these need.
        (M.DORA, 1, True, False, False),
        (M.DORA, 1, None, True, False),
        (M.LOHA, 1, None, False, False),
        # They could be, and the user has to say so.
        (M.OFT, 1, None, False, False),
        (M.FULL, 1, None, False, False),
        (M.LORA, 2, None, False, False),
        (M.DORA, 2, None, False, False),
    ],
)
def test_which_method_needs_units_of_its_own(
    method: M, version: int, use_orig_params: bool | None, trains_rows: bool, needs: bool
) -> None:
    assert needs_own_units(method, version, use_orig_params=use_orig_params, trains_rows=trains_rows) is needs


@pytest.mark.parametrize(
    ("own_units", "trains_rows", "needs"),
    [(True, False, False), (True, True, True), (False, False, True), (False, True, True), (None, False, True)],
)
def test_what_needs_original_parameters(own_units: bool | None, trains_rows: bool, needs: bool) -> None:
    assert needs_original_parameters(own_units=own_units, trains_rows=trains_rows) is needs


@pytest.mark.parametrize(
    ("method", "version", "own_units", "as_base"),
    [
        (M.LORA, 1, False, True),
        (M.LORA, 1, True, False),
        (M.LORA, 2, False, False),
        (M.LOHA, 1, False, True),
        (M.OFT, 1, True, False),
        # Magnitudes would never move in 16 bits.
        (M.DORA, 1, False, False),
        (M.FULL, 1, False, False),
    ],
)
def test_which_adapters_have_the_bases_element_type(method: M, version: int, own_units: bool, as_base: bool) -> None:
    assert holds_adapters_as_the_base(method, version, own_units=own_units) is as_base


@pytest.mark.parametrize(
    ("method", "plan", "reads"),
    [
        (M.DORA, LEAVES_ORIGINAL, True),
        (M.DORA, LEAVES, False),
        (M.DORA, ORIGINAL, False),
        (M.DORA, fsdp(2, use_orig_params=True, peft_wrap_policy=True), False),
        (M.LORA, LEAVES_ORIGINAL, False),
        (M.OFT, LEAVES_ORIGINAL, False),
    ],
)
def test_which_layers_read_weights_that_are_cut(method: M, plan: FsdpPlan, reads: bool) -> None:
    assert reads_sharded_weights(method, plan) is reads


@pytest.mark.parametrize(
    ("method", "version", "ranks", "dtype", "by_fsdp", "by_autocast"),
    [
        (M.LORA, 2, 1, BF16, None, BF16),
        (M.LORA, 1, 1, BF16, None, BF16),
        (M.LORA, 2, 2, BF16, BF16, None),
        (M.LORA, 2, 2, None, None, None),
        # FSDP 1 leaves the products of float32 adapters to autocast.
        (M.LORA, 1, 2, BF16, BF16, BF16),
        (M.FULL, 1, 2, BF16, BF16, BF16),
        (M.FULL, 2, 2, BF16, BF16, None),
        (M.LORA, 1, 2, None, None, None),
        # Weights of two units that are multiplied, and packed ones.
        (M.DORA, 1, 2, BF16, None, BF16),
        (M.QLORA, 1, 2, F16, None, F16),
        (M.DORA, 1, 2, F32, F32, F32),
        (M.QLORA, 1, 2, F32, F32, F32),
        (M.DORA, 2, 2, BF16, BF16, None),
        (M.QLORA, 2, 2, BF16, BF16, None),
        # Buffers, which FSDP 2 does not cast.
        (M.VERA, 2, 2, BF16, BF16, BF16),
        (M.LOHA, 2, 2, BF16, BF16, None),
    ],
)
def test_who_casts(method: M, version: int, ranks: int, dtype: str | None, by_fsdp: str | None, by_autocast: str | None) -> None:
    assert casts(method, version, ranks, dtype) == Casts(by_fsdp, by_autocast)


@pytest.mark.parametrize(
    ("plan", "is_sharded", "adapter", "full"),
    [
        # Whether gradients are summed after every micro-step: of an adapter, and of a whole model.
        (SECOND, False, False, True),
        (SECOND, True, False, True),
        (LEAVES, True, False, True),
        # One gradient for a unit's frozen and trained parameters.
        (ORIGINAL, True, True, True),
        (ORIGINAL, False, False, True),
        # FSDP 1 forgets what it has reduced into offloaded parameters.
        (fsdp(1, offload_params=True), True, False, False),
        (fsdp(1, offload_params=True), False, False, True),
        (fsdp(2, offload_params=True), True, False, True),
    ],
)
def test_when_gradients_are_reduced(plan: FsdpPlan, is_sharded: bool, adapter: bool, full: bool) -> None:
    assert reduces_every_micro_step(plan, is_sharded=is_sharded, trains_adapter=True) is adapter
    assert reduces_every_micro_step(plan, is_sharded=is_sharded, trains_adapter=False) is full


@pytest.mark.parametrize(
    ("parameter", "unit"),
    [
        ("embed.weight", ""),
        ("layers.0.q.weight", "layers.0.q"),
        ("layers.0.k.weight", "layers.0"),
        ("layers.0.q.lora_A.weight", "layers.0.q"),
        ("layers.0.qk.weight", "layers.0"),
        ("layers.01.weight", ""),
        ("scale", ""),
    ],
)
def test_a_parameter_belongs_to_the_innermost_unit_around_it(parameter: str, unit: str) -> None:
    assert innermost_unit(parameter, {"layers.0", "layers.0.q"}) == unit


def test_units_hold_their_parameters_in_order() -> None:
    a, b, c, d = (HeldParameter(name, BF16, is_trained=False) for name in ("x.1.a", "y.b", "x.1.c", "x.2.d"))
    assert by_unit([a, b, c, d], ["x.1", "x.2", "empty"]) == {"x.1": [a, c], "": [b], "x.2": [d]}


def test_each_element_type_has_an_example() -> None:
    parameters = [HeldParameter(name, dtype, is_trained=False) for name, dtype in (("a", BF16), ("b", F32), ("c", BF16))]
    assert element_types(parameters) == {BF16: "a", F32: "b"}


@pytest.mark.parametrize(
    ("minimum", "unfit", "units"),
    [
        (1, set(), ["m.a.x", "m.a.y", "m.b", "m"]),
        # Of m.a three values are left, and of m eight.
        (6, set(), ["m.a.y", "m.b", "m"]),
        (9, set(), ["m.a", "m.b"]),
        (9, {"m.a"}, ["m.b", "m"]),
        (24, set(), ["m"]),
        (25, set(), []),
    ],
)
def test_a_module_is_a_unit_by_what_is_left_for_it(minimum: int, unfit: set[str], units: list[str]) -> None:
    sizes = [("m.a.x.weight", 3), ("m.a.y.weight", 6), ("m.b.weight", 10), ("m.scale", 5), ("outside", 100)]
    assert large_modules(sizes, minimum, lambda name, _: name in unfit) == units


@pytest.mark.parametrize(
    ("method", "bits", "has_remote_code", "expected"),
    [
        (M.LORA, None, False, True),
        (M.QLORA, 4, False, True),
        (M.QLORA, 8, False, False),
        (M.LORA, None, True, False),
        (M.VERA, None, False, False),
    ],
)
def test_which_settings_let_ranks_read_their_shards_alone(
    method: M, bits: int | None, has_remote_code: bool, expected: bool
) -> None:
    assert can_load_shards(method, bits, has_remote_code=has_remote_code) is expected

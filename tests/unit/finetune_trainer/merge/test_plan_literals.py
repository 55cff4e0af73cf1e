"""Layout, held types and the arithmetic's settings of a merge, written by hand for tensors of a few bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.merge.adapter_settings import AdapterHeaders, adapter_settings
from finetune_trainer.merge.changes import Addition, LowRank, Orientation, Quantization, read_by
from finetune_trainer.merge.factors import bias_change, module_change
from finetune_trainer.merge.journal import Durable, Journal
from finetune_trainer.merge.plan import MergePlan, OutputTensor, _held_dtype, merge_plan, plan_digest, shard_layout
from finetune_trainer.weights import errors
from finetune_trainer.weights.families import FAMILIES
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel, StoredParameter
from tests.unit.finetune_trainer.merge.test_plan import Case, case, headers

Q0 = "model.layers.0.self_attn.q_proj.weight"


def tensor(name: str, dtype: str = "BF16", shape: tuple[int, ...] = (4,)) -> TensorHeader:
    return TensorHeader(name, dtype, shape, Path("file"), 64)


def output(name: str, dtype: str = "BF16", shape: tuple[int, ...] = (4,), source: str = "") -> OutputTensor:
    return OutputTensor(name, dtype, shape, tensor(name, source or dtype, shape), "F32")


def test_a_shard_is_a_length_a_header_and_its_tensors_the_wider_ones_first() -> None:
    (shard,) = shard_layout([output("a"), output("b", "F32", (2,)), output("c", "F32", (4,), source="BF16")], 1 << 20)
    length = int.from_bytes(shard.header[:8], "little")
    assert (len(shard.header), length % 8) == (8 + length, 0)
    # Four values of float32 take 16 bytes, whatever they were stored in.
    assert json.loads(shard.header[8:]) == {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "c": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        "a": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    start = len(shard.header)
    assert [(each.name, each.offset) for each in shard.tensors] == [("b", start), ("c", start + 8), ("a", start + 24)]
    assert shard.num_bytes == start + 32
    assert shard.file_name == "model.safetensors"


@pytest.mark.parametrize(
    ("limit", "groups"),
    [(32, ["abcd"]), (31, ["abc", "d"]), (16, ["ab", "cd"]), (15, ["a", "b", "c", "d"]), (1, ["a", "b", "c", "d"])],
)
def test_shards_are_filled_up_to_the_limit(limit: int, groups: list[str]) -> None:
    plan = MergePlan(shard_layout([output(name) for name in "abcd"], limit))
    assert ["".join(each.name for each in shard.tensors) for shard in plan.shards] == groups
    count = len(groups)
    if count == 1:
        assert (plan.index(), plan.index_file) == (None, None)
        return
    names = [f"model-0000{number}-of-0000{count}.safetensors" for number in range(1, count + 1)]
    assert [shard.file_name for shard in plan.shards] == names
    weight_map = {name: file for file, group in zip(names, groups, strict=True) for name in group}
    assert plan.index() == {"metadata": {"total_size": 32}, "weight_map": weight_map}
    assert plan.index_file == "model.safetensors.index.json"


def test_a_stack_is_a_matrix_for_each_expert_and_everything_else_one() -> None:
    change = (LowRank(tensor("a"), tensor("b"), None, 1.0, Orientation.LINEAR),)
    stack = dataclasses.replace(output("s", shape=(2, 3, 5)), changes=(change, change))
    assert stack.matrix_shape == (3, 5)
    assert dataclasses.replace(stack, changes=(change,)).matrix_shape == (2, 15)


@pytest.mark.parametrize(
    ("stored", "dtype", "held", "written"),
    [
        ("BF16", None, "BF16", "BF16"),
        ("BF16", "float32", "F32", "F32"),
        ("F32", "bfloat16", "F32", "BF16"),
        # Neither of the two holds all of the other.
        ("BF16", "float16", "F32", "F16"),
        ("F16", "bfloat16", "F32", "BF16"),
    ],
)
def test_a_weight_is_held_in_the_wider_of_both_types(stored: str, dtype: str | None, held: str, written: str) -> None:
    given = case()
    given.base = headers({name: each.shape for name, each in given.base.items()}, stored)
    found = {each.name: each for each in given.plan(dtype).tensors}
    assert (found[Q0].compute_dtype, found[Q0].dtype) == (held, written)
    assert found["model.layers.0.input_layernorm.weight"].compute_dtype == held


def test_what_the_library_holds_in_float32_is_merged_in_it() -> None:
    """transformers keeps `wo` of T5 in float32 where the rest of the model is float16."""
    model = StoredModel({}, {"model_type": "llama"}, dataclasses.replace(FAMILIES["llama"], held_in_fp32=frozenset({"wo"})))
    held = [_held_dtype(name, stored, "F16", model) for name, stored in (("a.wo.weight", "F16"), ("a.wi.weight", "F16"))]
    assert held == ["F32", "F16"]
    assert _held_dtype("a.wo.weight", "BF16", "BF16", model) == "BF16"


def test_indices_are_not_cast() -> None:
    given = case()
    given.base |= headers({"model.layers.0.order": (3,)}, "I64")
    (order,) = [each for each in given.plan("float32").tensors if each.name.endswith("order")]
    assert (order.dtype, order.compute_dtype, order.num_bytes) == ("I64", "I64", 24)


def planned(given: Case, **more: Any) -> MergePlan:
    return merge_plan(
        base=given.base,
        base_config=given.base_config,
        model=StoredModel(given.base, given.base_config, FAMILIES["llama"]),
        adapters=[AdapterHeaders(*each) for each in given.adapters],
        **{"dtype": None, "max_shard_bytes": 1 << 20, **more},
    )


def test_a_base_is_packed_before_an_adapter_is_added_and_not_where_it_is_replaced() -> None:
    packed = Quantization("nf4", double_quant=True, load_dtype="bfloat16", compute_dtype="bfloat16")
    up = "model.layers.0.mlp.up_proj.weight"
    plan = planned(case(saved=True), quantized={Q0: packed, up: packed, "lm_head.weight": packed})
    found = {each.name: each for each in plan.tensors}
    ((first, second),) = found[Q0].changes
    assert first == packed
    assert isinstance(second, LowRank)
    assert found[up].changes == ((packed,),)
    assert (found["lm_head.weight"].changes, found["lm_head.weight"].is_replaced) == ((), True)


def test_a_shard_has_bytes_and_a_known_type() -> None:
    with pytest.raises(errors.MergeError, match="max_shard_bytes is 0"):
        planned(case(), max_shard_bytes=0)
    with pytest.raises(errors.MergeError, match="dtype 'int8' is not one of"):
        planned(case(), dtype="int8")


def test_the_digest_is_of_inputs_and_files() -> None:
    one, two = (MergePlan(shard_layout([output("a"), output("b")], limit)) for limit in (16, 15))
    digests = {plan_digest(one, {}), plan_digest(two, {}), plan_digest(one, {"base": "1"}), plan_digest(one, {"base": "2"})}
    renamed = MergePlan(tuple(dataclasses.replace(shard, file_name="other") for shard in one.shards))
    assert len(digests | {plan_digest(renamed, {})}) == 5


# --- the factors of a layer ---


def change(
    a: tuple[int, ...], b: tuple[int, ...], weight: tuple[int, ...], model_type: str = "llama", dtype: str = "F32", **config: Any
) -> LowRank:
    found = {"lora_A": tensor("A", dtype, a), "lora_B": tensor("B", dtype, b)}
    settings = adapter_settings({"r": 2, "lora_alpha": 6, **config})
    return module_change("m.q", found, StoredParameter("m.q.weight", weight, ()), settings, model_type)


@pytest.mark.parametrize(
    ("a", "b", "weight", "model_type", "orientation"),
    [
        ((2, 4), (6, 2), (6, 4), "llama", Orientation.LINEAR),
        ((2, 4), (6, 2), (4, 6), "gpt2", Orientation.CONV1D),
        # A square one fits both ways.
        ((2, 4), (4, 2), (4, 4), "gpt2", Orientation.CONV1D),
        ((2, 4), (4, 2), (4, 4), "llama", Orientation.LINEAR),
    ],
)
def test_how_a_product_is_laid_over_a_weight(
    a: tuple[int, ...], b: tuple[int, ...], weight: tuple[int, ...], model_type: str, orientation: Orientation
) -> None:
    found = change(a, b, weight, model_type)
    assert (found.orientation, found.scaling, found.a.name, found.b.name) == (orientation, 3.0, "A", "B")


def test_factors_that_do_not_fit_are_refused() -> None:
    for a, b in (((4, 2), (6, 2)), ((2, 4), (6, 3)), ((2, 5), (6, 2))):
        with pytest.raises(errors.AdapterTensorMisshapedError):
            change(a, b, (6, 4))
    with pytest.raises(errors.AdapterTensorMisshapedError, match="dtype I8"):
        change((2, 4), (6, 2), (6, 4), dtype="I8")
    with pytest.raises(errors.AdapterTensorMissingError, match="lora_magnitude_vector is missing"):
        change((2, 4), (6, 2), (6, 4), use_dora=True)


def test_a_bias_on_b_is_scaled_and_needs_one_in_the_base() -> None:
    settings, trained = adapter_settings({"r": 2, "lora_alpha": 6, "lora_bias": True}), {"lora_B.bias": tensor("bias")}
    assert bias_change("m.q", trained, StoredParameter("m.q.bias", (4,), ()), settings) == Addition(tensor("bias"), 3.0)
    assert bias_change("m.q", {}, None, settings) is None
    with pytest.raises(errors.UnsupportedAdapterError, match="has none that it could be"):
        bias_change("m.q", trained, None, settings)


def test_what_a_change_reads() -> None:
    a, b, magnitude = (tensor(name) for name in ("a", "b", "m"))
    assert read_by(LowRank(a, b, magnitude, 1.0, Orientation.LINEAR)) == (a, b, magnitude)
    assert read_by(LowRank(a, b, None, 1.0, Orientation.LINEAR)) == (a, b)


# --- adapter_config.json ---


def test_what_peft_means_by_nothing() -> None:
    settings = adapter_settings({})
    assert (settings.r, settings.lora_alpha, settings.scaling("m.q")) == (8, 8, 1.0)


@pytest.mark.parametrize(("rslora", "scalings"), [(False, (6 / 4, 9 / 4, 6 / 16)), (True, (6 / 2, 9 / 2, 6 / 4))])
def test_ranks_and_scalings_of_patterns(rslora: bool, scalings: tuple[float, ...]) -> None:
    config = {"r": 4, "lora_alpha": 6, "use_rslora": rslora, "alpha_pattern": {"v": 9}, "rank_pattern": {"k": 16}}
    settings = adapter_settings(config)
    assert tuple(settings.scaling(f"m.{name}") for name in "qvk") == scalings
    assert tuple(settings.rank(f"m.{name}") for name in "qvk") == (4, 4, 16)


def test_which_modules_have_an_adapter() -> None:
    settings = adapter_settings(
        {"target_modules": ["q_proj", "proj"], "exclude_modules": ["1.q_proj"], "modules_to_save": ["head"]}
    )
    names = ("layers.0.q_proj", "layers.1.q_proj", "layers.0.k_proj", "layers.0.proj", "q_proj", "head.proj")
    assert [settings.targets(name) for name in names] == [True, False, False, True, True, False]


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_a_start_that_changes_the_base_is_refused(init: str) -> None:
    with pytest.raises(errors.UnsupportedAdapterError, match="changed the base weights"):
        adapter_settings({"init_lora_weights": init})


def test_the_journal_of_another_merge_is_not_continued(tmp_path: Path) -> None:
    for plan, continued in (("one", False), ("one", True), ("two", False), ("two", True)):
        journal = Journal(tmp_path / "journal", plan, {"base": "b"})
        assert (journal.is_continued, bool(journal.durable)) == (continued, continued)
        journal.record("model.safetensors", Durable(8, "1" * 64))
        journal.close()

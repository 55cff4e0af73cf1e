"""Layout, dtypes and settings of a merge have the values that were written by hand for small tensors."""

import dataclasses
import json
from pathlib import Path

import pytest

from finetune_trainer.merge.adapter_settings import adapter_settings
from finetune_trainer.merge.changes import Addition, LowRank, Orientation, Quantization
from finetune_trainer.merge.factors import bias_change, module_change
from finetune_trainer.merge.plan import MergePlan, OutputTensor, _held_dtype, shard_layout
from finetune_trainer.weights import errors
from finetune_trainer.weights.families import FAMILIES
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import StoredModel, StoredParameter
from tests.unit.finetune_trainer.merge.test_plan import case, headers

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
    assert [(placed.name, placed.offset) for placed in shard.tensors] == [("b", start), ("c", start + 8), ("a", start + 24)]
    assert shard.num_bytes == start + 32
    assert shard.file_name == "model.safetensors"


@pytest.mark.parametrize(
    ("limit", "groups"),
    [(32, ["abcd"]), (31, ["abc", "d"]), (16, ["ab", "cd"]), (15, ["a", "b", "c", "d"]), (1, ["a", "b", "c", "d"])],
)
def test_shards_are_filled_up_to_the_limit(limit: int, groups: list[str]) -> None:
    plan = MergePlan(shard_layout([output(name) for name in "abcd"], limit))
    assert ["".join(placed.name for placed in shard.tensors) for shard in plan.shards] == groups
    count = len(groups)
    if count == 1:
        assert plan.index() is None
        return
    names = [f"model-0000{number}-of-0000{count}.safetensors" for number in range(1, count + 1)]
    assert [shard.file_name for shard in plan.shards] == names
    weight_map = {name: file for file, group in zip(names, groups, strict=True) for name in group}
    assert plan.index() == {"metadata": {"total_size": 32}, "weight_map": weight_map}


def test_a_stack_is_a_matrix_for_each_expert_and_everything_else_one() -> None:
    change = (LowRank(tensor("a"), tensor("b"), None, 1.0, Orientation.LINEAR),)
    stack = dataclasses.replace(output("s", shape=(2, 3, 5)), changes=(change, change))
    assert stack.matrix_shape == (3, 5)
    assert dataclasses.replace(stack, changes=(change,)).matrix_shape == (2, 15)


def test_what_the_library_holds_in_float32_is_merged_in_it() -> None:
    """transformers keeps `wo` of T5 in float32 where the rest of the model is float16."""
    model = StoredModel({}, {"model_type": "llama"}, dataclasses.replace(FAMILIES["llama"], held_in_fp32=frozenset({"wo"})))
    dtypes = [_held_dtype(name, stored, "F16", model) for name, stored in (("a.wo.weight", "F16"), ("a.wi.weight", "F16"))]
    assert dtypes == ["F32", "F16"]
    assert _held_dtype("a.wo.weight", "BF16", "BF16", model) == "BF16"


def test_indices_are_not_cast() -> None:
    given = case()
    given.base |= headers({"model.layers.0.order": (3,)}, "I64")
    (order,) = [placed for placed in given.plan("float32").tensors if placed.name.endswith("order")]
    assert (order.dtype, order.compute_dtype, order.num_bytes) == ("I64", "I64", 24)


def test_a_base_is_packed_before_an_adapter_is_added_and_not_where_it_is_replaced() -> None:
    packed = Quantization("nf4", double_quant=True, load_dtype="bfloat16", compute_dtype="bfloat16")
    up = "model.layers.0.mlp.up_proj.weight"
    plan = case(saved=True).plan(quantized={Q0: packed, up: packed, "lm_head.weight": packed})
    outputs = {placed.name: placed for placed in plan.tensors}
    ((first, second),) = outputs[Q0].changes
    assert first == packed
    assert isinstance(second, LowRank)
    assert outputs[up].changes == ((packed,),)
    assert (outputs["lm_head.weight"].changes, outputs["lm_head.weight"].is_replaced) == ((), True)


def test_a_shard_has_bytes_and_a_known_type() -> None:
    with pytest.raises(errors.MergeError, match="max_shard_bytes is 0"):
        case().plan(max_shard_bytes=0)
    with pytest.raises(errors.MergeError, match="dtype 'int8' is not one of"):
        case().plan("int8")


# --- the factors of a layer ---


def test_factors_of_a_dtype_in_which_adapters_are_not_trained_are_refused() -> None:
    factors = {"lora_A": tensor("A", "I8", (2, 4)), "lora_B": tensor("B", "I8", (6, 2))}
    with pytest.raises(errors.AdapterTensorError, match="dtype I8"):
        module_change("m.q", factors, StoredParameter("m.q.weight", (6, 4), ()), adapter_settings({"r": 2}), "llama")


def test_a_bias_on_b_is_scaled_and_needs_one_in_the_base() -> None:
    settings, trained = adapter_settings({"r": 2, "lora_alpha": 6, "lora_bias": True}), {"lora_B.bias": tensor("bias")}
    assert bias_change("m.q", trained, StoredParameter("m.q.bias", (4,), ()), settings) == Addition(tensor("bias"), 3.0)
    assert bias_change("m.q", {}, None, settings) is None
    with pytest.raises(errors.UnsupportedAdapterError, match="has no bias to add it to"):
        bias_change("m.q", trained, None, settings)


# --- adapter_config.json ---


def test_defaults_are_those_of_peft() -> None:
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

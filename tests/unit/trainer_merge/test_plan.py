"""The plan uses every adapter tensor exactly once, lays out every base tensor exactly once, and refuses the rest by name."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.merge import errors
from finetune_trainer.merge.headers import DTYPE_BYTES, TensorHeader
from finetune_trainer.merge.plan import MergePlan, merge_plan

HIDDEN, INNER, VOCABULARY = 8, 12, 20
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (4, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
Headers = dict[str, TensorHeader]


def headers(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> Headers:
    found, offset = {}, 64
    for name, shape in shapes.items():
        found[name] = TensorHeader(name, dtype, shape, Path("file"), offset)
        offset += found[name].num_bytes
    return found


def base_headers(num_layers: int = 2) -> Headers:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(num_layers):
        for name, shape in LINEARS.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
        shapes[f"model.layers.{layer}.self_attn.q_proj.bias"] = (HIDDEN,)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return headers(shapes)


@dataclasses.dataclass
class Case:
    base: Headers
    adapter: Headers
    config: dict[str, Any]
    base_config: dict[str, Any]

    def plan(self, dtype: str | None = None, max_shard_bytes: int = 1 << 30) -> MergePlan:
        return merge_plan(
            base=self.base,
            base_config=self.base_config,
            adapter=self.adapter,
            adapter_config=self.config,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )


def case(
    *, targets: list[str] | None = None, rank: int = 3, num_layers: int = 2, dora: bool = False, embedding: bool = False,
    saved: bool = False, bias: str = "none", rank_pattern: dict[str, int] | None = None, **config: Any,
) -> Case:  # fmt: skip
    targets = targets or ["q_proj", "down_proj"]
    patterns = rank_pattern or {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(num_layers):
        for name, (num_out, num_in) in LINEARS.items():
            if name.rpartition(".")[2] not in targets:
                continue
            r = patterns.get(name.rpartition(".")[2], rank)
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            shapes |= {f"{prefix}.lora_A.weight": (r, num_in), f"{prefix}.lora_B.weight": (num_out, r)}
            if dora:
                shapes[f"{prefix}.lora_magnitude_vector"] = (num_out,)
            if bias != "none" and name == "self_attn.q_proj":
                shapes[f"{prefix}.base_layer.bias"] = (num_out,)
    if embedding:
        prefix = "base_model.model.model.embed_tokens"
        shapes |= {f"{prefix}.lora_embedding_A": (rank, VOCABULARY), f"{prefix}.lora_embedding_B": (HIDDEN, rank)}
        shapes |= {f"{prefix}.base_layer.weight": (VOCABULARY, HIDDEN)}
        if dora:
            shapes[f"{prefix}.lora_magnitude_vector"] = (HIDDEN,)
        targets = [*targets, "embed_tokens"]
    if saved:
        shapes["base_model.model.lm_head.weight"] = (VOCABULARY, HIDDEN)
    full = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": targets, "use_dora": dora, "bias": bias,
        "modules_to_save": ["lm_head"] if saved else None, "rank_pattern": patterns, **config,
    }  # fmt: skip
    base_config = {"model_type": "llama", "tie_word_embeddings": False, "num_hidden_layers": num_layers}
    return Case(base_headers(num_layers), headers(shapes, "F32"), full, base_config)


cases = st.builds(
    case,
    targets=st.lists(st.sampled_from([name.rpartition(".")[2] for name in LINEARS]), min_size=1, unique=True),
    rank=st.integers(1, 6),
    num_layers=st.integers(1, 12),
    dora=st.booleans(),
    embedding=st.booleans(),
    saved=st.booleans(),
    bias=st.sampled_from(["none", "all", "lora_only"]),
    rank_pattern=st.dictionaries(st.sampled_from(["q_proj", "down_proj"]), st.integers(1, 5)),
)


def used_by(plan: MergePlan, adapter: Headers) -> list[str]:
    used = []
    for tensor in plan.tensors:
        if tensor.low_rank:
            parts = [tensor.low_rank.a, tensor.low_rank.b, tensor.low_rank.magnitude]
            used += [part.name for part in parts if part]
        if tensor.is_replaced:
            used.append(tensor.source.name)
    return [name for name in used if name in adapter]


@settings(deadline=None, max_examples=60)
@given(cases, st.sampled_from([None, "float32", "bfloat16", "float16"]), st.integers(1, 4000))
def test_a_plan_is_complete_and_without_overlap(given_case: Case, dtype: str | None, max_shard_bytes: int) -> None:
    plan = given_case.plan(dtype, max_shard_bytes)
    assert sorted(used_by(plan, given_case.adapter)) == sorted(given_case.adapter) == list(plan.adapter_tensors)
    assert sorted(tensor.name for tensor in plan.tensors) == sorted(given_case.base)
    for shard in plan.shards:
        header_bytes = int.from_bytes(shard.header[:8], "little")
        assert len(shard.header) == 8 + header_bytes
        written = json.loads(shard.header[8:])
        position = len(shard.header)
        for tensor in shard.tensors:
            assert tensor.offset == position
            assert tensor.num_bytes == math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            assert written[tensor.name]["data_offsets"] == [
                position - 8 - header_bytes,
                position + tensor.num_bytes - 8 - header_bytes,
            ]
            assert tensor.shape == given_case.base[tensor.name].shape
            position += tensor.num_bytes
        assert position == shard.num_bytes
        assert len(shard.tensors) == 1 or position - len(shard.header) <= max_shard_bytes
    index = plan.index()
    assert (index is None) == (len(plan.shards) == 1)
    if index is not None:
        assert sorted(index["weight_map"]) == sorted(given_case.base)


@settings(deadline=None, max_examples=40)
@given(cases, st.data())
def test_any_missing_low_rank_tensor_is_refused_by_name(given_case: Case, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([n for n in given_case.adapter if "lora_" in n]))
    del given_case.adapter[name]
    with pytest.raises(errors.AdapterTensorMissingError) as refusal:
        given_case.plan()
    module = name.removeprefix("base_model.model.").partition(".lora_")[0]
    assert module in str(refusal.value)


@settings(deadline=None, max_examples=40)
@given(cases, st.data())
def test_any_misshaped_tensor_is_refused_by_name(given_case: Case, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(given_case.adapter)))
    tensor = given_case.adapter[name]
    axis = data.draw(st.integers(0, len(tensor.shape) - 1))
    shape = tuple(size + (1 if index == axis else 0) for index, size in enumerate(tensor.shape))
    given_case.adapter[name] = dataclasses.replace(tensor, shape=shape)
    with pytest.raises(errors.AdapterTensorMisshapedError) as refusal:
        given_case.plan()
    assert name in str(refusal.value)


@pytest.mark.parametrize(
    "extra",
    [
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.input_layernorm.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        "base_model.model.score.weight",
    ],
)
def test_a_tensor_that_fits_nowhere_is_refused_by_name(extra: str) -> None:
    given_case = case()
    given_case.adapter |= headers({extra: (HIDDEN,)}, "F32")
    with pytest.raises(errors.AdapterTensorUnknownError) as refusal:
        given_case.plan()
    assert extra in str(refusal.value)


def test_two_tensors_for_one_weight_are_refused() -> None:
    given_case = case(saved=True)
    given_case.adapter |= headers({"base_model.model.lm_head.base_layer.weight": (VOCABULARY, HIDDEN)}, "F32")
    with pytest.raises(errors.AdapterTensorDuplicateError, match=r"lm_head\.weight and .*lm_head\.base_layer"):
        given_case.plan()


def test_a_whole_layer_without_adapter_is_refused() -> None:
    given_case = case()
    given_case.adapter = {name: tensor for name, tensor in given_case.adapter.items() if "layers.1." not in name}
    with pytest.raises(errors.AdapterTensorMissingError, match=r"layers\.1"):
        given_case.plan()


def test_extra_layers_that_the_model_does_not_load_need_no_adapter() -> None:
    given_case = case(num_layers=2)
    given_case.base |= headers({"model.layers.2.self_attn.q_proj.weight": (HIDDEN, HIDDEN)})
    assert len(given_case.plan().adapter_tensors) == len(given_case.adapter)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [3]),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("peft_type", "IA3"),
    ],
)
def test_adapters_that_cannot_be_merged_exactly_are_refused_with_the_reason(field: str, value: Any) -> None:
    with pytest.raises(errors.UnsupportedAdapterError) as refusal:
        case(**{field: value}).plan()
    assert field in str(refusal.value)
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", None])
def test_inits_that_leave_the_base_alone_are_merged(init: Any) -> None:
    assert case(init_lora_weights=init).plan().adapter_tensors


@pytest.mark.parametrize("kind", ["embedding", "saved"])
@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {}, {"text_config": {"tie_word_embeddings": True}}])
def test_changing_one_of_two_tied_tensors_is_refused(kind: str, config: dict[str, Any]) -> None:
    given_case = case(**{kind: True})
    given_case.base_config = config
    del given_case.base["lm_head.weight"]
    with pytest.raises(errors.TiedWeightsError, match="Untie them before training, or drop"):
        given_case.plan()


def test_an_adapter_elsewhere_in_a_tied_model_is_merged() -> None:
    given_case = case()
    given_case.base_config["tie_word_embeddings"] = True
    del given_case.base["lm_head.weight"]
    assert given_case.plan().adapter_tensors


def test_single_experts_are_refused() -> None:
    given_case = case()
    shapes = {"model.layers.0.mlp.experts.3.w1.weight": (HIDDEN, HIDDEN)}
    given_case.base |= headers(shapes)
    given_case.adapter |= headers({"base_model.model.model.layers.0.mlp.experts.3.w1.lora_A.weight": (3, HIDDEN)})
    with pytest.raises(errors.UnsupportedAdapterError, match="mixture of experts"):
        given_case.plan()


def test_stored_experts_need_no_adapter_of_their_own() -> None:
    given_case = case(targets=["up_proj", "q_proj"])
    given_case.base |= headers({"model.layers.0.mlp.experts.3.up_proj.weight": (INNER, HIDDEN)})
    assert len(given_case.plan().adapter_tensors) == len(given_case.adapter)


def test_a_quantised_base_is_refused() -> None:
    given_case = case()
    given_case.base_config["quantization_config"] = {"quant_method": "bitsandbytes"}
    with pytest.raises(errors.UnsupportedBaseError, match="original 16-bit"):
        given_case.plan()


def test_scaling_follows_the_first_pattern_that_matches() -> None:
    given_case = case(alpha_pattern={r"layers\.1\..*": 12, "q_proj": 9}, use_rslora=True, rank=4)
    scalings = {tensor.name: tensor.low_rank.scaling for tensor in given_case.plan().tensors if tensor.low_rank}
    assert scalings == {
        "model.layers.0.self_attn.q_proj.weight": 9 / 2,
        "model.layers.0.mlp.down_proj.weight": 6 / 2,
        "model.layers.1.self_attn.q_proj.weight": 12 / 2,
        "model.layers.1.mlp.down_proj.weight": 12 / 2,
    }

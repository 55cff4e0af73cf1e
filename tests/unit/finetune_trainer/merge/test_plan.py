"""The plan uses every adapter tensor exactly once, lays out every base tensor exactly once, and refuses the rest by name."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.merge.changes import Addition, LowRank, ModuleMerge, Orientation, Quantization, TokenRows, read_by
from finetune_trainer.merge.plan import MergePlan, OutputTensor, merge_plan, plan_digest, shard_layout
from finetune_trainer.weights import errors
from finetune_trainer.weights.families import FAMILIES
from finetune_trainer.weights.headers import DTYPE_BYTES, TensorHeader
from finetune_trainer.weights.stored import ExpertPart, StoredModel
from tests.support.cases import table

HIDDEN, INNER, VOCABULARY = 8, 12, 20
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (4, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
Headers = dict[str, TensorHeader]


def headers(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> Headers:
    tensors, offset = {}, 64
    for name, shape in shapes.items():
        tensors[name] = TensorHeader(name, dtype, shape, Path("file"), offset)
        offset += tensors[name].num_bytes
    return tensors


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
    adapters: list[tuple[Headers, dict[str, Any]]]
    base_config: dict[str, Any]

    @property
    def adapter(self) -> Headers:
        return self.adapters[0][0]

    @property
    def names(self) -> list[str]:
        return sorted(name for headers, _ in self.adapters for name in headers)

    def plan(self, dtype: str | None = None, max_shard_bytes: int = 1 << 30, **more: Any) -> MergePlan:
        family = FAMILIES[self.base_config["model_type"]]
        return merge_plan(
            base=self.base,
            base_config=self.base_config,
            model=StoredModel(self.base, self.base_config, family),
            adapters=[AdapterHeaders(headers, config) for headers, config in self.adapters],
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            **more,
        )

    def followed_by(self, other: "Case") -> "Case":
        return Case(self.base, [*self.adapters, *other.adapters], self.base_config)


def case(
    *, targets: list[str] | None = None, rank: int = 3, num_layers: int = 2, dora: bool = False, embedding: bool = False,
    saved: bool = False, bias: str = "none", rank_pattern: dict[str, int] | None = None, tokens: bool = False,
    lora_bias: bool = False, tied: bool = False, layers: list[int] | None = None, **config: Any,
) -> Case:  # fmt: skip
    targets = ["q_proj"] if lora_bias else targets or ["q_proj", "down_proj"]
    embedding = embedding and not lora_bias  # PEFT has no bias on embeddings
    patterns = rank_pattern or {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(num_layers) if layers is None else layers:
        for name, (num_out, num_in) in LINEARS.items():
            if name.rpartition(".")[2] not in targets:
                continue
            r = patterns.get(name.rpartition(".")[2], rank)
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            shapes |= {f"{prefix}.lora_A.weight": (r, num_in), f"{prefix}.lora_B.weight": (num_out, r)}
            if dora:
                shapes[f"{prefix}.lora_magnitude_vector"] = (num_out,)
            if lora_bias:
                shapes[f"{prefix}.lora_B.bias"] = (num_out,)
            elif bias != "none" and name == "self_attn.q_proj":
                shapes[f"{prefix}.base_layer.bias"] = (num_out,)
    prefix = "base_model.model.model.embed_tokens"
    if embedding:
        shapes |= {f"{prefix}.lora_embedding_A": (rank, VOCABULARY), f"{prefix}.lora_embedding_B": (HIDDEN, rank)}
        shapes |= {f"{prefix}.base_layer.weight": (VOCABULARY, HIDDEN)}
        if dora:
            shapes[f"{prefix}.lora_magnitude_vector"] = (HIDDEN,)
        targets = [*targets, "embed_tokens"]
    elif tokens and not (tied and saved):  # PEFT cannot train these together
        shapes[f"{prefix}.token_adapter.trainable_tokens_delta"] = (2, HIDDEN)
        config["trainable_token_indices"] = [1, VOCABULARY - 1]
    if saved:
        shapes["base_model.model.lm_head.weight"] = (VOCABULARY, HIDDEN)
    full = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": targets, "use_dora": dora, "bias": bias,
        "modules_to_save": ["lm_head"] if saved else None, "rank_pattern": patterns, "lora_bias": lora_bias,
        "layers_to_transform": layers, **config,
    }  # fmt: skip
    base_config = {"model_type": "llama", "tie_word_embeddings": tied, "num_hidden_layers": num_layers}
    base = base_headers(num_layers)
    if tied:
        del base["lm_head.weight"]
    return Case(base, [(headers(shapes, "F32"), full)], base_config)


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
    tokens=st.booleans(),
    lora_bias=st.booleans(),
    tied=st.booleans(),
)


def used_by(plan: MergePlan) -> list[str]:
    """Return the names of the adapters' tensors that are read for each output tensor."""
    names: list[str] = []
    for tensor in plan.tensors:
        changed = [header.name for matrix in tensor.changes for change in matrix for header in read_by(change)]
        names += dict.fromkeys([*([tensor.source.name] if tensor.is_replaced else []), *changed])
    return names


@settings(deadline=None, max_examples=60)
@given(cases, st.sampled_from([None, "float32", "bfloat16", "float16"]), st.integers(1, 4000))
def test_a_plan_is_complete_and_without_overlap(given_case: Case, dtype: str | None, max_shard_bytes: int) -> None:
    plan = given_case.plan(dtype, max_shard_bytes)
    used = used_by(plan)
    assert sorted(set(used)) == given_case.names == sorted(header.name for header in plan.adapter_tensors)
    is_tied = given_case.base_config["tie_word_embeddings"]
    # What PEFT loads into the shared memory of tied embeddings belongs to both once they are parted.
    assert is_tied or len(used) == len(set(used))
    parts = is_tied and any("lm_head" in name or "embed_tokens.lora" in name for name in given_case.names)
    assert dict(plan.config_changes) == ({"tie_word_embeddings": False} if parts else {})
    names = {*given_case.base, *(["lm_head.weight"] if parts else [])}
    assert sorted(tensor.name for tensor in plan.tensors) == sorted(names)
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
            assert (
                tensor.shape == (VOCABULARY, HIDDEN) if tensor.name not in given_case.base else given_case.base[tensor.name].shape
            )
            position += tensor.num_bytes
        assert position == shard.num_bytes
        assert len(shard.tensors) == 1 or position - len(shard.header) <= max_shard_bytes
    index = plan.index()
    assert (index is None) == (len(plan.shards) == 1)
    if index is not None:
        assert sorted(index["weight_map"]) == sorted(names)


@settings(deadline=None, max_examples=40)
@given(cases, st.data())
def test_any_missing_low_rank_tensor_is_refused_by_name(given_case: Case, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([n for n in given_case.adapter if "lora_" in n]))
    del given_case.adapter[name]
    with pytest.raises(errors.AdapterTensorError) as refusal:
        given_case.plan()
    module = name.removeprefix("base_model.model.").partition(".lora_")[0]
    assert module in str(refusal.value)


@settings(deadline=None, max_examples=30)
@given(cases)
def test_a_plain_adapter_follows_any_other(first: Case) -> None:
    """Whatever the first adapter is, the changes of both are in order."""
    plain = case(targets=["v_proj", "q_proj"], rank=2, num_layers=first.base_config["num_hidden_layers"])
    alone = {tensor.name: tensor.changes for tensor in first.plan().tensors}
    plan = first.followed_by(plain).plan()
    for tensor in plan.tensors:
        further = alone[tensor.name]
        if "v_proj" in tensor.name or "q_proj.weight" in tensor.name:
            assert len(tensor.changes[0]) == (len(further[0]) if further else 0) + 1
            assert tensor.changes[0][:-1] == (further[0] if further else ())
        else:
            assert tensor.changes == further


@settings(deadline=None, max_examples=40)
@given(cases, st.data())
def test_any_misshaped_tensor_is_refused_by_name(given_case: Case, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(given_case.adapter)))
    tensor = given_case.adapter[name]
    axis = data.draw(st.integers(0, len(tensor.shape) - 1))
    shape = tuple(size + (1 if index == axis else 0) for index, size in enumerate(tensor.shape))
    given_case.adapter[name] = dataclasses.replace(tensor, shape=shape)
    with pytest.raises(errors.AdapterTensorError) as refusal:
        given_case.plan()
    assert name in str(refusal.value)


@pytest.mark.parametrize("extra", table(__file__, "test_a_tensor_that_fits_nowhere_is_refused_by_name"))
def test_a_tensor_that_fits_nowhere_is_refused_by_name(extra: str) -> None:
    given_case = case()
    given_case.adapter.update(headers({extra: (HIDDEN,)}, "F32"))
    with pytest.raises(errors.AdapterTensorError) as refusal:
        given_case.plan()
    assert extra in str(refusal.value)


@pytest.mark.parametrize(
    ("module", "words"),
    [("score", "belongs to a classifier's output layer.*Merge it with PEFT"), ("scores", "trained on another model")],
)
def test_the_head_of_a_classifier_is_recognised(module: str, words: str) -> None:
    name = f"base_model.model.{module}.weight"
    for given_case in (case(), case(peft_type="IA3")):
        given_case.adapter.clear()
        given_case.adapter.update(headers({name: (2, HIDDEN)}, "F32"))
        with pytest.raises(errors.AdapterTensorError, match=f"{re.escape(name)}:? .*{words}"):
            given_case.plan()


def test_extra_layers_that_the_model_does_not_load_need_no_adapter() -> None:
    given_case = case(num_layers=2)
    given_case.base |= headers({"model.layers.2.self_attn.q_proj.weight": (HIDDEN, HIDDEN)})
    assert len(given_case.plan().adapter_tensors) == len(given_case.adapter)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_replication", [[0, 2]]),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "mica"),
        ("peft_type", "PROMPT_TUNING"),
    ],
)
def test_adapters_that_cannot_be_merged_exactly_are_refused_with_the_reason(field: str, value: Any) -> None:
    with pytest.raises(errors.UnsupportedAdapterError) as refusal:
        case(**{field: value}).plan()
    assert field in str(refusal.value)
    assert str(value) in str(refusal.value)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", None])
def test_inits_that_leave_the_base_alone_are_merged(init: Any) -> None:
    assert case(init_lora_weights=init).plan().adapter_tensors


@pytest.mark.parametrize("kind", ["embedding", "saved"])
def test_embeddings_that_are_changed_apart_are_written_apart(kind: str) -> None:
    given_case = case(tied=True, **{kind: True})
    plan = given_case.plan()
    assert plan.config_changes == {"tie_word_embeddings": False}
    outputs = {tensor.name: tensor for tensor in plan.tensors}
    embedding, head = outputs["model.embed_tokens.weight"], outputs["lm_head.weight"]
    if kind == "saved":
        assert (head.source.name, head.is_replaced, head.changes) == ("base_model.model.lm_head.weight", True, ())
        assert (embedding.source, embedding.is_changed_by_adapter) == (given_case.base["model.embed_tokens.weight"], False)
    else:
        copy = "base_model.model.model.embed_tokens.base_layer.weight"
        assert (head.source.name, head.changes) == (copy, ())  # loaded into the memory that both share in the base
        assert embedding.source.name == copy
        assert len(embedding.changes[0]) == 1


def test_a_nested_configuration_is_untied_where_it_says_so_itself() -> None:
    given_case = case(tied=True, saved=True)
    given_case.base_config["text_config"] = {"tie_word_embeddings": True, "hidden_size": HIDDEN}
    changes = given_case.plan().config_changes
    assert changes == {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False, "hidden_size": HIDDEN}}


def test_tied_embeddings_of_a_type_that_ties_always_are_refused() -> None:
    shapes = {"shared.weight": (VOCABULARY, HIDDEN), "encoder.block.0.layer.0.SelfAttention.q.weight": (HIDDEN, HIDDEN)}
    base, config = headers(shapes), {"model_type": "t5", "tie_word_embeddings": True}
    adapter = headers({"base_model.model.lm_head.weight": (VOCABULARY, HIDDEN)}, "F32")
    settings = {"peft_type": "LORA", "target_modules": [], "modules_to_save": ["lm_head"]}
    with pytest.raises(errors.TiedWeightsError, match=r"changes lm_head\.weight differently .* whatever config\.json says"):
        Case(base, [(adapter, settings)], config).plan()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (case(bias="all"), case(bias="all"), "would undo it"),
        (case(saved=True), case(saved=True), "would undo it"),
        (case(), case(dora=True), "DoRA's norms"),
        (case(dora=True), case(dora=True), "DoRA's norms"),
        (case(bias="all"), case(lora_bias=True), "trained on other weights"),
        (case(tokens=True), case(tokens=True), "trained row 1"),
        (case(), case(peft_type="IA3"), "Merge one, and then the next"),
    ],
    ids=["bias", "saved", "dora second", "dora twice", "bias then lora_bias", "tokens", "another method"],
)
def test_adapters_whose_sum_is_not_defined_are_refused(first: Case, second: Case, reason: str) -> None:
    with pytest.raises(errors.UnsupportedAdapterError, match=reason):
        first.followed_by(second).plan()


def test_layers_to_transform_limits_which_tensors_are_missed() -> None:
    assert case(layers=[1]).plan().adapter_tensors
    incomplete = case(layers=[1])
    incomplete.adapters[0][1]["layers_to_transform"] = [0, 1]
    with pytest.raises(errors.AdapterTensorError, match=r"layers\.0"):
        incomplete.plan()


def test_stored_experts_need_no_adapter_of_their_own() -> None:
    given_case = case(targets=["up_proj", "q_proj"])
    given_case.base_config |= {"model_type": "qwen3_moe", "num_experts": 1}
    for name, shape in {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}.items():
        given_case.base |= headers({f"model.layers.0.mlp.experts.0.{name}.weight": shape})
    assert len(given_case.plan().adapter_tensors) == len(given_case.adapter)


def remove(*parts: str) -> Callable[[Case], None]:
    """Return an edit that removes tensors of base and adapter whose names contain one of these parts."""

    def edit(given_case: Case) -> None:
        for tensors in (given_case.base, given_case.adapter):
            for name in [name for name in tensors if any(part in name for part in parts)]:
                del tensors[name]

    return edit


def add_copy_of_the_head(given_case: Case) -> None:
    given_case.adapter.update(headers({"base_model.model.lm_head.base_layer.weight": (VOCABULARY, HIDDEN)}, "F32"))


@pytest.mark.parametrize(
    ("given_case", "edit", "error", "words"),
    [
        (case(saved=True), add_copy_of_the_head, errors.AdapterTensorError, r"lm_head\.base_layer\.weight and .*lm_head\.weight"),
        (case(), remove("layers.1.self_attn.q_proj.lora"), errors.AdapterTensorError, r"layers\.1"),
        (case(lora_bias=True), remove("layers.0.self_attn.q_proj.bias"), errors.UnsupportedAdapterError,
         r"layers\.0\.self_attn\.q_proj.*has no bias"),
        (case(tokens=True), lambda given: given.adapters[0][1].update(trainable_token_indices=[1, VOCABULARY]),
         errors.AdapterTensorError, f"holds {VOCABULARY}"),
        (case(tokens=True), remove("trainable_tokens_delta"), errors.AdapterTensorError, "trainable_tokens_delta"),
        (case(), lambda given: given.adapters.clear(), errors.MergeError, "there is no adapter"),
        (case(), lambda given: given.base_config.update(quantization_config={"quant_method": "bitsandbytes"}),
         errors.UnsupportedBaseError, "original 16-bit"),
    ],
    ids=["two for one weight", "a layer without adapter", "no bias to add to", "token beyond the vocabulary", "missing tokens",
         "no adapter", "quantised base"],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(
    given_case: Case, edit: Callable[[Case], Any], error: type[errors.MergeError], words: str
) -> None:
    edit(given_case)
    with pytest.raises(error, match=words):
        given_case.plan()


def test_a_plan_has_the_digest_that_earlier_releases_gave_it() -> None:
    """The digest is stored with the output. If it changed, finished and unfinished merges would be discarded."""
    expert = ExpertPart(1, 4, 8, 2, 3)
    tensor = TensorHeader("weight", "BF16", (8, 4), Path("somewhere/base.safetensors"), 64)
    part = TensorHeader("lora_A", "F32", (2, 4), Path("elsewhere/adapter.safetensors"), 128)
    packed = Quantization("nf4", double_quant=True, load_dtype="bfloat16", compute_dtype="float32", is_transposed=True)
    module = ModuleMerge(
        "model.up", "Linear", "weight", {"weight": tensor}, {"lokr_w1": part}, {"r": 8, "peft_type": "LOKR"}, (8, 4)
    )
    changes = (
        (packed, LowRank(part, part, part, 0.5, Orientation.CONV1D, expert)),
        (LowRank(part, part, None, 2.0, Orientation.LINEAR), Addition(part, 1.5)),
        (TokenRows((3, 5), part),),
        (module,),
    )
    outputs = [
        OutputTensor("weight", "BF16", (8, 4), tensor, "F32", changes),
        OutputTensor("other", "F32", (8, 4), tensor, "F32"),
    ]
    plan = MergePlan(shard_layout(outputs, 1 << 30), config_changes={"tie_word_embeddings": False})
    assert plan_digest(plan, {"adapter": "a" * 64}) == "d66509fec06583e837867f3320630467a2d6d5b2affcad80b25ad4f8d3c72b20"

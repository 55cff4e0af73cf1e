"""The plan uses every adapter tensor exactly once, lays out every base tensor exactly once, and refuses the rest by name."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.merge.adapter_settings import AdapterHeaders
from finetune_trainer.merge.changes import Addition, LowRank, ModuleMerge, Orientation, Quantization, TokenRows
from finetune_trainer.merge.plan import MergePlan, OutputTensor, merge_plan, plan_digest, shard_layout
from finetune_trainer.weights import errors
from finetune_trainer.weights.families import FAMILIES
from finetune_trainer.weights.headers import DTYPE_BYTES, TensorHeader
from finetune_trainer.weights.stored import ExpertPart, StoredModel

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
    adapters: list[tuple[Headers, dict[str, Any]]]
    base_config: dict[str, Any]

    @property
    def adapter(self) -> Headers:
        return self.adapters[0][0]

    @property
    def names(self) -> list[str]:
        return sorted(name for headers, _ in self.adapters for name in headers)

    def plan(self, dtype: str | None = None, max_shard_bytes: int = 1 << 30) -> MergePlan:
        family = FAMILIES[self.base_config["model_type"]]
        return merge_plan(
            base=self.base,
            base_config=self.base_config,
            model=StoredModel(self.base, self.base_config, family),
            adapters=[AdapterHeaders(headers, config) for headers, config in self.adapters],
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
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
    return [header.name for tensor in plan.tensors for header in tensor.adapter_tensors]


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
    with pytest.raises(errors.AdapterTensorMissingError) as refusal:
        given_case.plan()
    module = name.removeprefix("base_model.model.").partition(".lora_")[0]
    assert module in str(refusal.value)


@settings(deadline=None, max_examples=30)
@given(cases)
def test_a_plain_adapter_follows_any_other(first: Case) -> None:
    """One after the other: the changes of both, in order, whatever the first is."""
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
        "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.modules_to_save.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.score.weight",
    ],
)
def test_a_tensor_that_fits_nowhere_is_refused_by_name(extra: str) -> None:
    given_case = case()
    given_case.adapter.update(headers({extra: (HIDDEN,)}, "F32"))
    with pytest.raises(errors.AdapterTensorUnknownError) as refusal:
        given_case.plan()
    assert extra in str(refusal.value)


@pytest.mark.parametrize(
    ("module", "words"),
    [("score", "is the output layer of a classifier.*Merge such an adapter with PEFT"), ("scores", "trained on another model")],
)
def test_the_head_of_a_classifier_is_told_to_be_one(module: str, words: str) -> None:
    name = f"base_model.model.{module}.weight"
    for given_case in (case(), case(peft_type="IA3")):
        given_case.adapter.clear()
        given_case.adapter.update(headers({name: (2, HIDDEN)}, "F32"))
        with pytest.raises(errors.AdapterTensorUnknownError, match=f"{re.escape(name)}: .*{words}"):
            given_case.plan()


def test_two_tensors_for_one_weight_are_refused() -> None:
    given_case = case(saved=True)
    given_case.adapter.update(headers({"base_model.model.lm_head.base_layer.weight": (VOCABULARY, HIDDEN)}, "F32"))
    with pytest.raises(errors.AdapterTensorDuplicateError, match=r"lm_head\.base_layer\.weight and .*lm_head\.weight"):
        given_case.plan()


def test_a_whole_layer_without_adapter_is_refused() -> None:
    given_case = case()
    for name in [name for name in given_case.adapter if "layers.1." in name]:
        del given_case.adapter[name]
    with pytest.raises(errors.AdapterTensorMissingError, match=r"layers\.1"):
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
    found = {tensor.name: tensor for tensor in plan.tensors}
    embedding, head = found["model.embed_tokens.weight"], found["lm_head.weight"]
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


def test_trained_tokens_of_tied_embeddings_stay_tied() -> None:
    plan = case(tied=True, tokens=True).plan()
    found = {tensor.name: tensor for tensor in plan.tensors}
    assert plan.config_changes == {}
    assert "lm_head.weight" not in found
    assert [type(change).__name__ for change in found["model.embed_tokens.weight"].changes[0]] == ["TokenRows"]


def test_tied_embeddings_of_a_type_that_ties_always_are_refused() -> None:
    shapes = {"shared.weight": (VOCABULARY, HIDDEN), "encoder.block.0.layer.0.SelfAttention.q.weight": (HIDDEN, HIDDEN)}
    base, config = headers(shapes), {"model_type": "t5", "tie_word_embeddings": True}
    adapter = headers({"base_model.model.lm_head.weight": (VOCABULARY, HIDDEN)}, "F32")
    settings = {"peft_type": "LORA", "target_modules": [], "modules_to_save": ["lm_head"]}
    with pytest.raises(errors.TiedWeightsError, match=r"changes lm_head\.weight .* whatever config\.json says"):
        merge_plan(
            base=base,
            base_config=config,
            model=StoredModel(base, config, FAMILIES["t5"]),
            adapters=[AdapterHeaders(adapter, settings)],
            dtype=None,
            max_shard_bytes=1 << 30,
        )


def test_an_adapter_elsewhere_in_a_tied_model_leaves_it_tied() -> None:
    plan = case(tied=True).plan()
    assert plan.config_changes == {}
    assert "lm_head.weight" not in {tensor.name for tensor in plan.tensors}


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (case(bias="all"), case(bias="all"), "would undo it"),
        (case(saved=True), case(saved=True), "would undo it"),
        (case(), case(dora=True), "DoRA's norms"),
        (case(dora=True), case(dora=True), "DoRA's norms"),
        (case(bias="all"), case(lora_bias=True), "trained on other weights"),
        (case(tokens=True), case(tokens=True), "trained row 1"),
        (case(), case(peft_type="IA3"), "Merge one, and the next"),
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
    with pytest.raises(errors.AdapterTensorMissingError, match=r"layers\.0"):
        incomplete.plan()


def test_lora_bias_without_a_bias_to_add_to_is_refused() -> None:
    given_case = case(lora_bias=True)
    del given_case.base["model.layers.0.self_attn.q_proj.bias"]
    with pytest.raises(errors.UnsupportedAdapterError, match=r"layers\.0\.self_attn\.q_proj.*has none"):
        given_case.plan()


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    given_case = case(tokens=True)
    given_case.adapters[0][1]["trainable_token_indices"] = [1, VOCABULARY]
    with pytest.raises(errors.AdapterTensorMisshapedError, match=f"holds {VOCABULARY}"):
        given_case.plan()


def test_missing_tokens_are_refused() -> None:
    given_case = case(tokens=True)
    del given_case.adapter["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    with pytest.raises(errors.AdapterTensorMissingError, match="trainable_tokens_delta"):
        given_case.plan()


def test_no_adapter_is_refused() -> None:
    given_case = case()
    given_case.adapters.clear()
    with pytest.raises(errors.MergeError, match="no adapter"):
        given_case.plan()


def test_stored_experts_need_no_adapter_of_their_own() -> None:
    given_case = case(targets=["up_proj", "q_proj"])
    given_case.base_config |= {"model_type": "qwen3_moe", "num_experts": 1}
    for name, shape in {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}.items():
        given_case.base |= headers({f"model.layers.0.mlp.experts.0.{name}.weight": shape})
    assert len(given_case.plan().adapter_tensors) == len(given_case.adapter)


def test_a_quantised_base_is_refused() -> None:
    given_case = case()
    given_case.base_config["quantization_config"] = {"quant_method": "bitsandbytes"}
    with pytest.raises(errors.UnsupportedBaseError, match="original 16-bit"):
        given_case.plan()


def test_scaling_follows_the_first_pattern_that_matches() -> None:
    given_case = case(alpha_pattern={r"layers\.1\..*": 12, "q_proj": 9}, use_rslora=True, rank=4)
    scalings = {tensor.name: change.scaling for tensor in given_case.plan().tensors for change in sum(tensor.changes, ())}
    assert scalings == {
        "model.layers.0.self_attn.q_proj.weight": 9 / 2,
        "model.layers.0.mlp.down_proj.weight": 6 / 2,
        "model.layers.1.self_attn.q_proj.weight": 12 / 2,
        "model.layers.1.mlp.down_proj.weight": 12 / 2,
    }


def test_the_digest_knows_every_setting_and_no_directory() -> None:
    plan = case().plan()
    moved = case()
    moved.base = {name: dataclasses.replace(tensor, file=Path("elsewhere") / "file") for name, tensor in moved.base.items()}
    assert plan_digest(plan, {}) == plan_digest(moved.plan(), {})
    others = [case(lora_alpha=7), case(use_rslora=True), case(bias="all"), case(tokens=True), case(rank=4)]
    digests = {plan_digest(other.plan(), {}) for other in others}
    digests |= {plan_digest(plan, {"adapter": "changed"}), plan_digest(case().plan(dtype="float32"), {}), plan_digest(plan, {})}
    assert len(digests) == len(others) + 3


def test_a_plan_has_the_digest_that_earlier_releases_gave_it() -> None:
    """It is stored with what was merged: with another digest a merge that is done, or under way, would be thrown away."""
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

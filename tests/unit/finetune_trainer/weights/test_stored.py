"""Every parameter of a model is found in its files, whatever its name there, and every stored element belongs to one place."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPTNeoXConfig, PreTrainedModel, T5Config

from finetune_trainer.weights import errors, families
from finetune_trainer.weights.families import FAMILIES, ModelFamily
from finetune_trainer.weights.headers import read_checkpoint, read_json
from finetune_trainer.weights.name_rules import Unreadable
from finetune_trainer.weights.read_model import read_stored_model
from finetune_trainer.weights.stored import StoredModel
from tests.unit.finetune_trainer.merge import moe, tiny
from tests.unit.finetune_trainer.merge.test_plan import headers


def expert_shapes(num_experts: int, hidden: int = 4, inner: int = 6) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (8, hidden),
        "model.layers.0.block_sparse_moe.gate.weight": (2, 4),
    }
    for expert in range(num_experts):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        shapes |= {
            f"{prefix}.w1.weight": (inner, hidden),
            f"{prefix}.w2.weight": (hidden, inner),
            f"{prefix}.w3.weight": (inner, hidden),
        }
    return shapes


def mixtral(shapes: dict[str, tuple[int, ...]], **config: Any) -> StoredModel:
    return StoredModel(headers(shapes), config, FAMILIES["mixtral"])


def test_operation_that_is_not_understood_is_refused_only_where_an_adapter_needs_it() -> None:
    family = families.library_family({"model_type": "hrm_text", "num_hidden_layers": 1})
    assert family is not None
    assert any(isinstance(rule, Unreadable) for rule in family.rules)
    stored = StoredModel(
        headers({"model.layers.0.attn.gqkv_proj.weight": (16, 4), "model.layers.0.attn.o_proj.weight": (4, 4)}), {}, family
    )
    assert stored.parameter("model.layers.0.self_attn.o_proj.weight") is not None
    with pytest.raises(errors.UnsupportedBaseError, match=r"self_attn.k_proj.weight: transformers computes it .* by Chunk"):
        stored.parameter("model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(errors.UnsupportedBaseError, match="by Chunk"):
        stored.require_readable()


def test_what_is_joined_from_several_tensors_can_be_read_and_not_be_merged_into() -> None:
    layers = ["linear_attention", "full_attention"]
    family = families.library_family({"model_type": "olmo_hybrid", "num_hidden_layers": 2, "layer_types": layers})
    assert family is not None
    module = "model.layers.0.linear_attn"
    # Not in the order of the rows.
    shapes = {
        f"{module}.v_conv1d.weight": (8, 1, 4),
        f"{module}.q_conv1d.weight": (4, 1, 4),
        f"{module}.k_conv1d.weight": (6, 1, 4),
    }
    stored = StoredModel(headers(shapes), {}, family)
    with pytest.raises(errors.UnsupportedBaseError, match="by Concatenate"):
        stored.parameter(f"{module}.conv1d.weight")
    stored.require_readable()
    joined = stored.readable(f"{module}.conv1d.weight")
    assert joined is not None
    assert joined.shape == (18, 1, 4)
    assert [(part.header.name[-15], part.place) for part in joined.parts] == [
        ("q", (slice(0, 4),)),
        ("k", (slice(4, 10),)),
        ("v", (slice(10, 18),)),
    ]
    incomplete = StoredModel(headers(dict(list(shapes.items())[:2])), {}, family)
    with pytest.raises(errors.UnsupportedBaseError, match="by Concatenate"):
        incomplete.readable(f"{module}.conv1d.weight")


def test_single_experts_can_be_read_by_the_names_that_they_are_stored_under() -> None:
    """As models with code of their own have them, of types that transformers has with stacks of experts."""
    stored = StoredModel(headers(expert_shapes(2)), {}, FAMILIES["mixtral"])
    path = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    assert stored.parameter(path) is None
    found = stored.readable(path)
    assert found is not None
    assert [part.header.name for part in found.parts] == [path]
    assert stored.readable("model.layers.0.block_sparse_moe.experts.2.w2.weight") is None


def test_unknown_model_type_is_read_as_it_stands() -> None:
    named = families.family_of({"model_type": "somebodys_own"}, {"lm_head.weight": None})
    assert named.rules == ()
    assert not named.is_tied({})
    assert families.family_of({"model_type": "somebodys_own"}, {}).is_tied({})


def gpt_neox() -> PreTrainedModel:
    config = GPTNeoXConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    return AutoModelForCausalLM.from_config(config)


def t5() -> PreTrainedModel:
    return AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: AutoModelForCausalLM.from_config(tiny.llama()),
    "qwen2 tied": lambda: AutoModelForCausalLM.from_config(tiny.qwen2()),
    "gpt2": lambda: AutoModelForCausalLM.from_config(tiny.gpt2()),
    "gpt_neox": gpt_neox,
    "t5": t5,
    **{kind: partial(AutoModelForCausalLM.from_config, config) for kind, config in moe.CONFIGS.items()},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("form", ["published", "fused", "without its head"])
def test_every_parameter_is_assembled_from_its_parts(kind: str, form: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    saved = getattr(model, model.base_model_prefix, model) if form == "without its head" else model
    saved.save_pretrained(tmp_path, max_shard_size="40KB", save_original_format=form != "fused")
    config = read_json(tmp_path / "config.json")
    stored = read_stored_model(read_checkpoint(tmp_path), config)
    values = moe.load_weights(tmp_path)
    wanted = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if form != "without its head" or not name.startswith("lm_head")
    }
    for path, tensor in wanted.items():
        parameter = stored.parameter(path)
        assert parameter is not None, path
        assembled = torch.full(parameter.shape, float("nan"))
        for part in parameter.parts:
            assembled[part.place] = values[part.header.name]
        assert torch.equal(assembled, tensor), path
    tied = {frozenset(tie.paths) for tie in stored.ties}
    assert tied == _shared(model)
    assert {part.header.name for parameter in stored.parameters.values() for part in parameter.parts} == set(values)


def _shared(model: PreTrainedModel) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


@pytest.mark.parametrize("equal", [True, False])
def test_stored_copies_are_tied_only_where_they_are_equal(equal: bool, tmp_path: Path) -> None:
    model = t5()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed_tokens" not in name}
    if not equal:
        values["lm_head.weight"][-1, -1] += 1
    model.save_pretrained(tmp_path)
    save_file(values, tmp_path / "model.safetensors")
    stored = read_stored_model(read_checkpoint(tmp_path), read_json(tmp_path / "config.json"))
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (stored.tie("lm_head.weight") is not None) is equal
    assert (loaded.lm_head.weight is loaded.shared.weight) is equal
    assert stored.tie("decoder.embed_tokens.weight") is not None


def test_old_and_left_out_names_find_the_parameter() -> None:
    stored = mixtral(expert_shapes(2))
    for spelling in ("model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight", "layers.0.mlp.gate.weight"):
        assert stored.path(spelling) == "model.layers.0.mlp.gate.weight"
        found = stored.parameter(spelling)
        assert found is not None
        assert found.parts[0].header.name == "model.layers.0.block_sparse_moe.gate.weight"
    assert stored.parameter("model.layers.1.mlp.gate.weight") is None
    assert stored.module("model.layers.0.block_sparse_moe.gate") == "model.layers.0.mlp.gate"


def test_layers_for_multi_token_prediction_are_recognised() -> None:
    stored = mixtral(expert_shapes(2), num_hidden_layers=3)
    assert not stored.is_extra("model.layers.2.mlp.gate.weight")
    assert stored.is_extra("model.layers.3.mlp.gate.weight")
    assert not stored.is_extra("lm_head.weight")


def test_files_without_the_models_prefix_may_hold_a_head() -> None:
    stored = StoredModel(headers({"h.0.attn.c_attn.weight": (4, 12), "lm_head.weight": (8, 4)}), {}, FAMILIES["gpt2"])
    assert set(stored.parameters) == {"transformer.h.0.attn.c_attn.weight", "lm_head.weight"}


def test_parameter_tied_to_a_tied_one_shares_its_memory() -> None:
    ties = {"lm_head.weight": "decoder.weight", "decoder.weight": "shared.weight"}
    stored = StoredModel(headers({"shared.weight": (8, 4)}), {"tie_word_embeddings": True}, ModelFamily("", ties))
    assert [set(tie.paths) for tie in stored.ties] == [{"shared.weight", "decoder.weight", "lm_head.weight"}]
    assert stored.parameter("lm_head.weight") is stored.parameters["shared.weight"]


def test_dense_model_is_read_without_importing_the_libraries(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny.llama()).save_pretrained(tmp_path)
    program = (
        "import sys; from pathlib import Path; from finetune_trainer.weights.headers import read_checkpoint, read_json;"
        "from finetune_trainer.weights.read_model import read_stored_model; base = Path(sys.argv[1]);"
        "assert read_stored_model(read_checkpoint(base), read_json(base / 'config.json')).parameters;"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=120)


W1, W2, W3 = (f"model.layers.0.block_sparse_moe.experts.1.{name}.weight" for name in ("w1", "w2", "w3"))


@pytest.mark.parametrize(
    ("edit", "config", "words"),
    [
        (lambda found: found.pop(W3), {}, r"gate_up_proj: expert 1 of 3 has no tensor named like '.experts.\*.w3.weight'"),
        (lambda found: found.update(headers({W1: (5, 4)})), {}, r"experts.1.w1.weight: shape \[5, 4\] does not fit"),
        (lambda found: found.update(headers({W2: (4, 6)}, "F32")), {}, "experts.1.w2.weight: dtype F32"),
        (lambda found: None, {"num_local_experts": 4}, r"hold 3 experts, config.json says \[4\]"),
    ],
    ids=["missing", "of another shape", "of another dtype", "of another number"],
)
def test_experts_that_do_not_fit_are_named(edit: Callable[[Any], Any], config: dict[str, Any], words: str) -> None:
    found = headers(expert_shapes(3))
    StoredModel(found, {"num_local_experts": 3}, FAMILIES["mixtral"])
    edit(found)
    with pytest.raises(errors.BrokenCheckpointError, match=words):
        StoredModel(found, config, FAMILIES["mixtral"])


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], str]:
    kind = draw(st.sampled_from(["mixtral", "qwen3_moe"]))
    names = ("w1", "w2", "w3") if kind == "mixtral" else ("gate_proj", "down_proj", "up_proj")
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"
    hidden, inner, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 12))
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,), "lm_head.weight": (7, hidden)}
    for layer in range(draw(st.integers(1, 2))):
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = (hidden, hidden)
        shapes[f"model.layers.{layer}.{block}.gate.weight"] = (num_experts, hidden)
        for expert in range(num_experts):
            for name, shape in zip(names, ((inner, hidden), (hidden, inner), (inner, hidden)), strict=True):
                shapes[f"model.layers.{layer}.{block}.experts.{expert}.{name}.weight"] = shape
    order = draw(st.permutations(list(shapes)))
    return {name: shapes[name] for name in order}, kind


@settings(max_examples=60, deadline=None)
@given(checkpoints())
def test_every_stored_element_has_exactly_one_place(checkpoint: tuple[dict[str, tuple[int, ...]], str]) -> None:
    shapes, kind = checkpoint
    stored = StoredModel(headers(shapes), {}, FAMILIES[kind])
    seen: list[str] = []
    for path, parameter in stored.parameters.items():
        filled = torch.zeros(parameter.shape, dtype=torch.int)
        for part in parameter.parts:
            assert filled[part.place].shape == part.header.shape
            filled[part.place] += 1
            seen.append(part.header.name)
            places = parameter.expert_parts(part) if len(parameter.shape) == 3 else ()
            assert all(place.num_experts == parameter.shape[0] for place in places)
        assert bool((filled == 1).all()), path
    assert sorted(seen) == sorted(shapes)

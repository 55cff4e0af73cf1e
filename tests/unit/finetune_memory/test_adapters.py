"""What PEFT adds to a model, by name, shape and element type, against PEFT itself on the meta device."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from finetune_memory.adapters import trained_parameters
from finetune_memory.describe import ModelMetadata, model_shape
from finetune_memory.families import base_parameters
from finetune_memory.model_shape import UnknownModelError
from finetune_trainer.added_tokens import AddedTokens, with_trained_rows
from finetune_trainer.model.adapters import attach
from tests.support.cases import table
from tests.support.tiny_model import plan_of, tiny_spec
from tests.unit.finetune_memory.configs import CONFIGS

DENSE = ["Llama-3.2-1B", "Qwen3-0.6B", "Gemma-3-1B", "Phi-3-mini", "GPT-2", "Pythia-1.4B", "StarCoder2-3B"]
LORA: dict[str, dict[str, Any]] = table(__file__, "LORA")
METHODS = [
    pytest.param(name, method, settings, id=f"{title}, {name}")
    for title, (names, method, settings) in table(__file__, "METHODS").items()
    for name in names
]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("case", sorted(LORA))
def test_lora(name: str, case: str) -> None:
    _compare(name, {"type": "LoRA", "lora": LORA[case]})


@pytest.mark.parametrize(("name", "method", "settings"), METHODS)
def test_other_parts_of_a_model(name: str, method: str, settings: dict[str, Any]) -> None:
    _compare(name, {"type": method, "lora": settings})


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-3.2-1B"])
@pytest.mark.parametrize("lora", [{}, {"modulesToSave": ["embed_tokens"]}, {"modulesToSave": ["embed_tokens", "lm_head"]}])
def test_rows_of_added_tokens(name: str, lora: dict[str, Any]) -> None:
    """Before the tokenizer is known: as many rows as tokens, and what PEFT makes of the model that has them."""
    spec = tiny_spec(model={"addedTokens": [{"content": each} for each in ("<a>", "<b>", "<c>")]})
    spec["method"] = {"type": "LoRA", "lora": {"targetModules": ["q_proj"], **lora}}
    plan, config = plan_of(spec), dict(CONFIGS[name])
    known = config["vocab_size"]
    rows = (known, known + 1, known + 2)
    is_tied = bool(config.get("tie_word_embeddings"))
    added = AddedTokens(
        tokens=plan.model.added_tokens,
        ids=rows,
        num_rows=known + 3,
        has_more_rows=True,
        embedding="embed_tokens",
        head="lm_head",
        separate_head=None if is_tied else "lm_head",
    )
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**config | {"vocab_size": known + 3}))
    real = attach(base.float(), with_trained_rows(plan, added))
    expected = {(name, tuple(each.shape)) for name, each in real.named_parameters()}
    shape = model_shape(plan, ModelMetadata(config, {}))
    assert {(each.name, each.shape) for each in shape.parameters} == expected
    assert shape.facts.vocabulary_size == known + 3


PHI: dict[str, Any] = {
    "model_type": "phi",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
"""Every linear layer has a bias, the output head, too."""


def phi(**changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING["phi"](**PHI | changes))


@pytest.mark.parametrize("lora", [*LORA.values(), {"modulesToSave": ["lm_head"]}, {"targetModules": ["lm_head"]}])
def test_a_model_that_its_files_alone_tell_of(lora: dict[str, Any]) -> None:
    """They name a layer's bias before its weight."""
    base = phi()
    tensors = {name: ("F32", tuple(each.shape)) for name, each in sorted(base.state_dict().items())}
    plan = plan_of(tiny_spec(method={"type": "LoRA", "lora": lora}))
    shape = model_shape(plan, ModelMetadata(PHI, tensors))
    expected = {(name, tuple(each.shape), each.requires_grad) for name, each in attach(base, plan).named_parameters()}
    assert {(each.name, each.shape, each.is_trained) for each in shape.parameters} == expected


def test_rows_of_added_tokens_of_a_head_with_a_bias() -> None:
    """Preflight refuses them, which an estimate does not know."""
    tensors = {name: ("F32", tuple(each.shape)) for name, each in sorted(phi().state_dict().items())}
    plan = plan_of(tiny_spec(model={"addedTokens": [{"content": "<a>"}]}, method={"type": "LoRA", "lora": {"r": 4}}))
    shape = model_shape(plan, ModelMetadata(PHI, tensors))
    found = {each.name: each.shape for each in shape.parameters if ".lm_head." in each.name}
    head = "base_model.model.lm_head.token_adapter"
    assert found == {
        f"{head}.base_layer.weight": (265, 64),
        f"{head}.base_layer.bias": (265,),
        f"{head}.trainable_tokens_delta.default": (1, 64),
    }


@pytest.mark.parametrize("name", ["Llama-3.1-70B", "Mixtral-8x7B"])
def test_full(name: str) -> None:
    _compare(name, {"type": "Full", "lora": None}, held="float32")


def test_other_methods_need_peft_itself() -> None:
    plan = plan_of(tiny_spec(method={"type": "VeRA", "lora": None}))
    with pytest.raises(UnknownModelError, match=r"spec\.method\.type: only PEFT itself knows what VeRA adds"):
        trained_parameters(base_parameters(CONFIGS["Llama-3.2-1B"], "float32"), plan.method, "float32", "llama")


def _compare(name: str, method: dict[str, Any], held: str = "bfloat16") -> None:
    config = {**CONFIGS[name], "num_hidden_layers": 4, "n_layer": 4}
    plan = plan_of(tiny_spec(method=method))
    settings = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**settings), dtype=getattr(torch, held))
        model = attach(base, plan) if plan.method.trains_adapter else base
    found = trained_parameters(base_parameters(config, held), plan.method, held, config["model_type"])
    expected = {
        name: (tuple(each.shape), str(each.dtype).removeprefix("torch."), each.requires_grad)
        for name, each in model.named_parameters()
    }
    assert {each.name: (each.shape, each.dtype, each.is_trained) for each in found} == expected
    assert [each.name for each in found] == list(expected)

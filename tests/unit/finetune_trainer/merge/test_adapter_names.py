"""The name of a tensor in a LoRA adapter file shows what it is; unknown names are refused."""

from pathlib import Path

import pytest

from finetune_trainer.merge.adapter_names import ParsedAdapter, parse_names
from finetune_trainer.weights import errors
from finetune_trainer.weights.headers import TensorHeader


def parsed(*names: str) -> ParsedAdapter:
    return parse_names({name: TensorHeader(name, "F32", (1,), Path("adapter"), 0) for name in names})


def test_each_kind_of_name_is_recognised() -> None:
    adapter = parsed(
        "base_model.model.layers.0.q.lora_A.weight",
        "base_model.model.layers.0.q.lora_B.weight",
        "base_model.model.layers.0.q.lora_magnitude_vector",
        "base_model.model.embed.lora_embedding_A",
        "base_model.model.tok.token_adapter.trainable_tokens_delta",
        "base_model.model.lm_head.weight",
        "base_model.model.layers.0.k.base_layer.bias",
    )
    assert {key: set(tensors) for key, tensors in adapter.factors.items()} == {
        ("layers.0.q", 0): {"lora_A", "lora_B", "lora_magnitude_vector"},
        ("embed", 0): {"lora_embedding_A"},
    }
    assert set(adapter.tokens) == {"tok"}
    assert set(adapter.whole) == {("lm_head", "weight")}
    assert set(adapter.base_copies) == {("layers.0.k", "bias")}


def test_factors_below_other_adapters_are_kept_apart_by_depth() -> None:
    adapter = parsed("base_model.model.experts.lora_A.weight", "base_model.model.experts.base_layer.base_layer.lora_A.weight")
    assert set(adapter.factors) == {("experts", 0), ("experts", 2)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.q.lora_A.weight", "begin with 'base_model.model.'"),
        ("base_model.model.layers.0.q.lora_ga_pro.weight", "lora_ga_pro.weight is not a part of a LoRA"),
        ("base_model.model.tok.base_layer.token_adapter.trainable_tokens_delta", "not named as PEFT saves"),
        ("base_model.model.weight", "not named as PEFT saves"),
    ],
)
def test_other_names_are_refused(name: str, words: str) -> None:
    with pytest.raises(errors.AdapterTensorError, match=words) as raised:
        parsed(name)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    "names",
    [
        ("base_model.model.q.lora_magnitude_vector", "base_model.model.q.lora_magnitude_vector.weight"),
        ("base_model.model.q.bias", "base_model.model.q.base_layer.bias"),
    ],
)
def test_two_names_of_one_thing_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(errors.AdapterTensorError, match="are the same part of the adapter"):
        parsed(*names)

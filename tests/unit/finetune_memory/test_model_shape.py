"""What a configuration says of a model without its code, and the sizes of its parameters."""

from __future__ import annotations

import pytest

from finetune_memory.model_shape import ParameterShape, UnknownModelError, Workload, facts_of

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}


def test_sizes_that_are_left_out_follow_from_others() -> None:
    facts = facts_of(LLAMA)
    assert (facts.head_size, facts.value_head_size, facts.num_key_value_heads, facts.activation) == (16, 16, 2, "silu")
    assert (facts.has_fused_attention, facts.has_whole_logits, facts.is_stored_otherwise) == (True, False, False)
    assert facts_of({"text_config": LLAMA}) == facts


def test_what_the_name_of_an_architecture_says() -> None:
    assert facts_of(LLAMA | {"model_type": "gemma2"}).has_whole_logits
    assert not facts_of(LLAMA | {"model_type": "gemma2"}).has_fused_attention
    assert facts_of(LLAMA | {"model_type": "mixtral"}).is_stored_otherwise
    assert not facts_of(LLAMA | {"model_type": "mixtral"}, is_stored_otherwise=False).is_stored_otherwise


@pytest.mark.parametrize("wrong", [{"vocab_size": None}, {"hidden_size": "64"}, {"num_attention_heads": 0}])
def test_a_configuration_without_sizes_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(UnknownModelError, match="names no hidden_size, num_attention_heads and vocab_size"):
        facts_of(LLAMA | wrong)


def test_values_bytes_and_module_of_a_parameter() -> None:
    weight = ParameterShape("model.layers.0.mlp.weight", (3, 5), "bfloat16", is_trained=False)
    assert (weight.numel, weight.num_bytes, weight.module) == (15, 30, "model.layers.0.mlp")


def test_a_workload_counts_the_tokens_of_all_rows() -> None:
    assert Workload(rows=4, length=128, has_mask=True, on_gpu=True).tokens == 512

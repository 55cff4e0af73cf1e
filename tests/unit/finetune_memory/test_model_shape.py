"""What a configuration says of a model without its code, and the sizes of its parameters."""

import pytest

from finetune_memory.model_shape import UnknownModelError, facts_of

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}


def test_sizes_that_are_left_out_follow_from_others() -> None:
    facts = facts_of(LLAMA)
    assert (facts.head_size, facts.value_head_size, facts.num_key_value_heads, facts.activation) == (16, 16, 2, "silu")
    assert (facts.has_fused_attention, facts.has_whole_logits, facts.is_stored_otherwise) == (True, False, False)
    assert facts_of({"text_config": LLAMA}) == facts


@pytest.mark.parametrize(
    ("changes", "fact", "value"),
    [
        ({"num_key_value_heads": None}, "num_key_value_heads", 4),
        ({"head_dim": 32}, "head_size", 32),
        ({"model_type": "mixtral"}, "experts_per_token", 2),
        ({"model_type": "qwen3_moe"}, "experts_per_token", 8),
        ({"num_experts_per_tok": 4}, "experts_per_token", 4),
        ({"model_type": "granite"}, "has_whole_logits", True),
        ({"model_type": "gemma2"}, "has_whole_logits", True),
        ({"model_type": "gemma2"}, "has_fused_attention", False),
        ({"model_type": "mixtral"}, "is_stored_otherwise", True),
        ({"model_type": "gpt2"}, "attention_dropout", 0.1),
        ({"model_type": "gpt2"}, "residual_dropout", 0.1),
        ({"model_type": "gpt2", "attn_pdrop": 0.0}, "attention_dropout", 0.0),
    ],
)
def test_facts_follow_from_settings_and_from_the_name_of_an_architecture(
    changes: dict[str, object], fact: str, value: object
) -> None:
    assert getattr(facts_of(LLAMA | changes), fact) == value


def test_preflight_knows_how_a_model_is_stored() -> None:
    assert not facts_of(LLAMA | {"model_type": "mixtral"}, is_stored_otherwise=False).is_stored_otherwise


@pytest.mark.parametrize("wrong", [{"vocab_size": None}, {"hidden_size": "64"}, {"num_attention_heads": 0}])
def test_a_configuration_without_sizes_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(UnknownModelError, match="names no hidden_size, num_attention_heads and vocab_size"):
        facts_of(LLAMA | wrong)

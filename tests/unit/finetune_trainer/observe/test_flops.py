"""Operations of a step against counts by hand, from the published dimensions of real models."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from finetune_trainer.observe.flops import ModelCost, model_cost

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
LLAMA_LAYER = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
LLAMA_MATRICES = 32 * LLAMA_LAYER + 4096 * 128256
"""7.505e9 of the 8.03e9 parameters; the rest is the embedding, which is a lookup, and norms."""


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_full_fine_tuning_of_llama_8b() -> None:
    model = on_meta(LLAMA_8B)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(8.03e9, rel=1e-3)
    cost = model_cost(model, model.config)
    assert cost == ModelCost(LLAMA_MATRICES, LLAMA_MATRICES, 32, 4096)
    assert cost.step_flops(1, 0) == 6 * LLAMA_MATRICES
    # One document of 4096 tokens: 12 x layers x width x length per token without a mask (PaLM, appendix B), half of it with one.
    assert cost.step_flops(4096, 4096**2) == 4096 * (6 * LLAMA_MATRICES + 12 * 32 * 4096 * 4096 / 2)


def test_lora_of_llama_8b_costs_four_per_frozen_and_six_per_trained_value() -> None:
    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=None)
    model = get_peft_model(on_meta(LLAMA_8B), config)
    adapters = 32 * 16 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3)
    cost = model_cost(model, LLAMA_8B)
    assert cost.trained_matmul_parameters == adapters
    assert cost.matmul_parameters == LLAMA_MATRICES + adapters
    assert cost.step_flops(1000, 0) == 1000 * (4 * LLAMA_MATRICES + 6 * adapters)


def test_a_layer_that_is_trained_whole_beside_adapters_counts_once() -> None:
    config = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    cost = model_cost(get_peft_model(on_meta(LLAMA_8B), config), LLAMA_8B)
    adapters = 32 * 8 * (4096 + 4096)
    assert cost.matmul_parameters == LLAMA_MATRICES + adapters
    assert cost.trained_matmul_parameters == adapters + 4096 * 128256


SIZES = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXTRAL = MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=8, num_experts_per_tok=2)
QWEN = {"moe_intermediate_size": 32, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4}


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (MIXTRAL, 64 * 64 * 2 + 64 * 32 * 2 + 64 * 8 + 2 * 3 * 64 * 128),
        (
            Qwen3MoeConfig(**SIZES, **QWEN, decoder_sparse_step=1, mlp_only_layers=[]),
            64 * 128 * 2 + 64 * 64 * 2 + 64 * 16 + 4 * 3 * 64 * 32,
        ),
    ],
    ids=["mixtral", "qwen3-moe"],
)
def test_of_experts_only_those_count_that_a_token_is_sent_to(config: Any, layer: int) -> None:
    model = on_meta(config)
    cost = model_cost(model, model.config)
    assert cost.matmul_parameters == 2 * layer + 64 * 1000
    assert cost.attention_width == 4 * (getattr(config, "head_dim", None) or 16)

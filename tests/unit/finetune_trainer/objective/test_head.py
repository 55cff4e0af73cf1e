"""An output layer that returns the loss is the layer that it was."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from finetune_trainer.data.batches import Batch
from finetune_trainer.objective import head
from finetune_trainer.objective.next_token import NextToken, targets_of
from tests.unit.finetune_trainer.train.recorded_steps import distance

CPU = torch.device("cpu")
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
SMALL_KV = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
MODELS: dict[str, tuple[Any, bool]] = {
    "llama": (LlamaConfig(**SMALL), True),
    "llama-tied": (LlamaConfig(**SMALL, tie_word_embeddings=True), True),
    "qwen2": (Qwen2Config(**SMALL_KV), True),
    "mixture": (Qwen3MoeConfig(**SMALL_KV, num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2), True),
    "gpt2": (GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), True),
    "gemma2-caps-logits": (Gemma2Config(**SMALL_KV), False),
    "cohere-scales-logits": (CohereConfig(**SMALL_KV), False),
    "granite-divides-logits": (GraniteConfig(**SMALL_KV, logits_scaling=4.0), False),
}


def small_batch() -> Batch:
    tokens = torch.arange(24).reshape(2, 12) * 7 % 64
    labels = tokens.clone()
    labels[0, :3] = -100
    return Batch(tokens, labels, torch.arange(12)[None].expand(2, 12).contiguous(), 20, (12, 12))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_our_head_learns_what_it_learns_with_its_own(name: str) -> None:
    config, is_replaced = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if "gemma2" in name else "sdpa").train()
    assert head.returns_output_of_head(model) is is_replaced
    batch = small_batch()
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    plain = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum") * 0.5
    plain.backward()
    wanted = {parameter_name: parameter.grad.clone() for parameter_name, parameter in model.named_parameters()}
    names = list(model.state_dict())
    model.zero_grad()
    NextToken().install(model)
    with head.scored(targets_of(batch.labels, 0.5, CPU)) as scoring:
        model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    assert (scoring.loss is not None) is is_replaced
    loss = NextToken().weighted_loss(model, batch, 0.5, CPU, None)
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for parameter_name, parameter in model.named_parameters():
        assert distance(parameter.grad, wanted[parameter_name]) < 1e-6, parameter_name
    assert list(model.state_dict()) == names
    again = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    assert torch.equal(again, logits), "outside of a scored call the model gives its logits"


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_an_adapted_head_keeps_its_names_and_its_loss(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, **{"target_modules": ["q_proj"], **settings})).train()
    batch, names = small_batch(), list(model.state_dict())
    whole = NextToken().weighted_loss(model, batch, 1.0, CPU, None)
    whole.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    wanted = {name: parameter.grad.clone() for name, parameter in trained.items()}
    model.zero_grad()
    NextToken().install(model)
    with head.scored(targets_of(batch.labels, 1.0, CPU)) as scoring:
        model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    assert scoring.loss is not None
    NextToken().weighted_loss(model, batch, 1.0, CPU, None).backward()
    assert list(model.state_dict()) == names
    for name, parameter in trained.items():
        assert distance(parameter.grad, wanted[name]) < 1e-6, name


def test_under_autocast_the_products_are_of_its_type() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).train()
    batch = small_batch()
    whole = NextToken().weighted_loss(model, batch, 1.0, CPU, torch.bfloat16)
    whole.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    NextToken().install(model)
    found = NextToken().weighted_loss(model, batch, 1.0, CPU, torch.bfloat16)
    found.backward()
    assert found.item() == pytest.approx(whole.item(), rel=1e-6)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight.grad, wanted["model.layers.0.mlp.up_proj.weight"])

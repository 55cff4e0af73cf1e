"""Tiny base models and adapters on disk for merge and verification tests, and PEFT's own merge of them as the oracle."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

VOCABULARY = 320
HIDDEN = 96
"""Not a multiple of the usual vector widths times unroll factors, so that kernels' edges are exercised."""


def llama(**changes: Any) -> PreTrainedConfig:
    """Two layers; the MLP has more rows than one block of a matrix product, with a remainder."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=600,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=64,
        **changes,
    )


def gpt2() -> PreTrainedConfig:
    return GPT2Config(vocab_size=VOCABULARY, n_embd=160, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)


def qwen2() -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=544,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


def save_base(directory: Path, config: PreTrainedConfig, dtype: torch.dtype, max_shard_size: str = "1GB") -> Path:
    """A base model with random weights, biases included, saved by transformers."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.05)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def save_adapter(
    directory: Path,
    base: Path,
    settings: PeftConfig,
    adapter_dtype: torch.dtype | None = None,
    seed: int = 5,
    auto: Any = AutoModelForCausalLM,
    num_rows: int | None = None,
) -> Path:
    """An adapter as after training: every trainable tensor moved away from where it began.

    adapter_dtype: what the adapter file holds, when not what PEFT trains in. auto: loads the base. num_rows: of its embeddings,
    if these are resized before.
    """
    loaded = auto.from_pretrained(base)
    if num_rows is not None:
        loaded.resize_token_embeddings(num_rows)
    model = get_peft_model(loaded, settings)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, dtype=torch.float32)
                if "magnitude" in name:
                    parameter.mul_(1 + 0.1 * noise.to(parameter.dtype))
                else:
                    parameter.add_(0.05 * noise.to(parameter.dtype))
    if adapter_dtype is not None:
        model.to(adapter_dtype)
    return save_peft(model, directory)


def save_peft(model: Any, directory: Path, **settings: Any) -> Path:
    """As PEFT saves it, but without the card for the Hub, which takes longer than a tiny adapter."""
    model.create_or_update_model_card = lambda _: None
    model.save_pretrained(directory, **settings)
    return directory


def peft_merged(base: Path, adapter: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """State dict of PEFT's own merge with default options, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto")
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=False)
    state: dict[str, torch.Tensor] = {name: tensor.clone() for name, tensor in merged.state_dict().items()}
    return state

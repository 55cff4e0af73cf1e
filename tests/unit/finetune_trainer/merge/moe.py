"""Tiny mixture-of-experts bases on disk, and adapters as older versions of PEFT saved them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

NUM_EXPERTS = 4
SHARD = "40KB"
"""Small enough that the parts of one expert lie in several shards."""
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=NUM_EXPERTS),
    # An expert's matrix has more rows than one block of a product.
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=300, head_dim=8),
    "qwen2_moe": Qwen2MoeConfig(**_SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=24, shared_expert_intermediate_size=40),
    "gpt_oss": GptOssConfig(**_SIZES, num_local_experts=NUM_EXPERTS, head_dim=8, layer_types=["full_attention"] * 2),
}
OLD_PROJECTIONS = {"mixtral": ("w1", "w2", "w3"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
"""Names of the linear layers of an expert in versions in which each was a module."""


def save_base(
    directory: Path, kind: str, dtype: torch.dtype, *, experts_fused: bool = False, max_shard_size: str = SHARD
) -> Path:
    """Save a base with random weights. Its experts are stored one by one, as in published models, or fused, as in the model."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(directory, max_shard_size=max_shard_size, save_original_format=not experts_fused)
    return directory


def save_old_adapter(directory: Path, base: Path, targets: tuple[str, ...], rank: int = 4, **settings: Any) -> Path:
    """Save an adapter as before transformers 5, with a pair of factors for every stored matrix of `targets` of every expert."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 6,
        "bias": "none",
        "target_modules": list(targets),
    }
    config |= settings
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, weight in load_weights(base).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and "shared_expert" not in module:
            a = torch.randn(rank, weight.shape[1], generator=generator)
            b = torch.randn(weight.shape[0], rank, generator=generator)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a * 0.1
            tensors[f"base_model.model.{module}.lora_B.weight"] = b * 0.1
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files of a directory."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors

"""Configurations of well-known models at their real sizes; nothing of that size is ever built."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-70b": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128009],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen2.5-7b": (
        "Qwen2Config",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3-tied": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe-235b": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "mlp_only_layers": [3, 7],
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", {}),
    "mixtral": ("MixtralConfig", {}),
    "mistral": ("MistralConfig", {}),
    "gemma2-9b": (
        "Gemma2Config",
        {"hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "num_hidden_layers": 42},
    ),
    "gemma3": ("Gemma3TextConfig", {}),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", {}),
    "deepseek-v3": ("DeepseekV3Config", {}),
    "granite-moe": ("GraniteMoeConfig", {"num_local_experts": 40, "num_experts_per_tok": 8}),
    "olmo2": ("Olmo2Config", {}),
    "falcon": ("FalconConfig", {}),
    "bloom": ("BloomConfig", {"hidden_size": 4096, "n_head": 32, "n_layer": 30}),
    "opt": ("OPTConfig", {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32}),
    "cohere2": ("Cohere2Config", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "gpt-oss": ("GptOssConfig", {}),
    "mamba": ("MambaConfig", {"hidden_size": 4096, "num_hidden_layers": 64}),
    "mamba2": ("Mamba2Config", {}),
    "jamba": ("JambaConfig", {}),
    "falcon-h1": ("FalconH1Config", {}),
    "llama4": ("Llama4TextConfig", {}),
    "gpt-neo": ("GPTNeoConfig", {}),
    "smollm3": ("SmolLM3Config", {}),
    "zamba": ("ZambaConfig", {}),
    "dots3-note": ("Dots3NoteTextConfig", {}),
}


def configuration(name: str) -> PreTrainedConfig:
    """One of them."""
    kind, sizes = SIZES[name]
    made: PreTrainedConfig = getattr(transformers, kind)(**sizes)
    return made

"""What the config.json of well-known models says of their sizes (settings that change no shape are left out)."""

from __future__ import annotations

from typing import Any


def _sizes(
    kind: str, hidden: int, width: int, layers: int, heads: int, shared: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": vocabulary,
        "pad_token_id": 0,
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _sizes("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "Llama-3.1-8B": _sizes("llama", 4096, 14336, 32, 32, 8, 128256),
    "Llama-3.1-70B": _sizes("llama", 8192, 28672, 80, 64, 8, 128256),
    "Llama-3.1-405B": _sizes("llama", 16384, 53248, 126, 128, 8, 128256),
    "Mistral-7B": _sizes("mistral", 4096, 14336, 32, 32, 8, 32768, head_dim=128),
    "Qwen2.5-0.5B": _sizes("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "Qwen2.5-7B": _sizes("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen3-0.6B": _sizes("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "Qwen3-8B": _sizes("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "Qwen3-32B": _sizes("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "Gemma-2B": _sizes("gemma", 2048, 16384, 18, 8, 1, 256000, head_dim=256),
    "Gemma-2-9B": _sizes("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256),
    "Gemma-3-1B": _sizes("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256),
    "Phi-3-mini": _sizes("phi3", 3072, 8192, 32, 32, 32, 32064),
    "OLMo-2-7B": _sizes("olmo2", 4096, 11008, 32, 32, 32, 100352),
    "Granite-3.1-8B": _sizes("granite", 4096, 12800, 40, 32, 8, 49155, tie_word_embeddings=True),
    "SmolLM3-3B": _sizes("smollm3", 2048, 11008, 36, 16, 4, 128256),
    "GLM-4-9B": _sizes("glm4", 4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True),
    "StarCoder2-3B": _sizes("starcoder2", 3072, 12288, 30, 24, 2, 49152),
    "GPT-2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    "Pythia-1.4B": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50304,
        "tie_word_embeddings": False,
    },
    "Mixtral-8x7B": _sizes("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8),
    "OLMoE-1B-7B": _sizes("olmoe", 2048, 1024, 16, 16, 16, 50304, num_experts=64),
    "Qwen1.5-MoE-A2.7B": _sizes(
        "qwen2_moe",
        2048,
        5632,
        24,
        16,
        16,
        151936,
        num_experts=60,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        mlp_only_layers=[0, 3],
    ),
    "Qwen3-30B-A3B": _sizes("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768),
    "DeepSeek-V2-Lite": _sizes(
        "deepseek_v2",
        2048,
        10944,
        27,
        16,
        16,
        102400,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "DeepSeek-V3": _sizes(
        "deepseek_v3",
        7168,
        18432,
        61,
        128,
        128,
        129280,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=256,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
    ),
}
"""By the name under which they were published."""

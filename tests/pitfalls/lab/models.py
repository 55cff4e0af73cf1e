"""Tiny models of several architectures, with random weights that are the same every time."""

import fcntl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.pitfalls.lab.cache import digest, directory

HIDDEN = 64
LAYERS = 2
VOCABULARY = 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 2 * HIDDEN,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "qwen2": ("Qwen2Config", _COMMON),
    "gemma": ("GemmaConfig", {**_COMMON, "head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_COMMON, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN},
    ),
    "mixtral": ("MixtralConfig", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 128,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
}
"""Class of the configuration and its settings, by the name that a case gives."""
LAYER_CLASSES = {
    "llama": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "gpt2": "GPT2Block",
}


def saved_model(name: str, config: Mapping[str, Any]) -> Path:
    """A directory with the model as safetensors in float32, written once."""
    place = directory() / "models" / f"{name}-{digest([name, dict(config)])[:16]}"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            _write(name, config, place)
            (place / "complete").touch()
    return place


def _write(name: str, config: Mapping[str, Any], place: Path) -> None:
    import torch
    import transformers

    config_class, settings = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**{**settings, **config}))
    # Whichever rank is the first: transformers would let only rank 0 write.
    model.should_save_on_this_rank = lambda _: True
    model.save_pretrained(place)

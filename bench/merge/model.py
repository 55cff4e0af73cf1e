"""A model of a chosen size and an all-linear adapter on disk, without a model in memory.

Weights come from one random block, read at another place for each tensor: their values do not matter for time or bits,
and making billions of random numbers would take longer than the merge.
"""

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

RANK = 16
BLOCK_VALUES = 1 << 22

SIZES: dict[str, dict[str, Any]] = {
    "toy": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
    "0.1B": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "0.3B wide": {
        "hidden_size": 8192, "intermediate_size": 9216, "num_hidden_layers": 1, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 1024,
    },
    "1.1B": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "3.2B": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "7B": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "Qwen2 0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "GPT-2 medium": {
        "model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024, "vocab_size": 50257,
        "dtype": "float32",
    },
}  # fmt: skip
"""Shapes of models, Llamas if nothing is said. 1.1B is TinyLlama's, 7B Llama 2's; 0.3B has a few large tensors. The last two are
as the Hub has them: with tied embeddings, and GPT-2 in float32.
"""
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gpt2": "GPT2LMHeadModel"}

Shapes = dict[str, tuple[int, ...]]


def write_base(directory: Path, parameters: str) -> int:
    """A base model in one file, in bf16 if its size says nothing else. Returns its weights' bytes."""
    size = SIZES[parameters]
    directory.mkdir(parents=True)
    kind = size.get("model_type", "llama")
    config = {
        "model_type": kind, "architectures": [_CLASSES[kind]], "dtype": "bfloat16", "tie_word_embeddings": kind == "gpt2",
        "bos_token_id": 1, "eos_token_id": 2, **size,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    # Random sign and mantissa and exponents around 2**-6: plain weights, no infinities.
    generator = random.Random(1)
    high = bytes(0x3C | (generator.getrandbits(1) << 7) for _ in range(1 << 16))
    low = [generator.randbytes(1 << 16) for _ in range(_width(size) - 1)]
    block = b"".join(bytes(value) for value in zip(*low, high, strict=True)) * (BLOCK_VALUES >> 16)
    return _write(directory / "model.safetensors", _base_shapes(size), "F32" if _width(size) == 4 else "BF16", block)


def num_bytes(parameters: str) -> int:
    """Of the base's weights."""
    size = SIZES[parameters]
    return _width(size) * sum(math.prod(shape) for shape in _base_shapes(size).values())


def _width(size: dict[str, Any]) -> int:
    """Bytes of a value."""
    return 4 if size.get("dtype") == "float32" else 2


def _base_shapes(size: dict[str, Any]) -> Shapes:
    """As saved: a head that is tied is left out."""
    if size.get("model_type") == "gpt2":
        return _gpt2_shapes(size)
    shapes: Shapes = {"model.embed_tokens.weight": (size["vocab_size"], size["hidden_size"])}
    for layer in range(size["num_hidden_layers"]):
        for name, shape in _linears(size).items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if size.get("model_type") == "qwen2" and name in _WITH_BIAS:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (size["hidden_size"],)
    shapes["model.norm.weight"] = (size["hidden_size"],)
    if not size.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (size["vocab_size"], size["hidden_size"])
    return shapes


_WITH_BIAS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Linear layers of Qwen2 that have one."""


def _gpt2_shapes(size: dict[str, Any]) -> Shapes:
    """Linear layers are stored as (in, out)."""
    width = size["n_embd"]
    shapes: Shapes = {
        "transformer.wte.weight": (size["vocab_size"], width),
        "transformer.wpe.weight": (size["n_positions"], width),
    }
    for layer in range(size["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"transformer.h.{layer}.{norm}.{part}": (width,) for part in ("weight", "bias")}
        for name, (num_out, num_in) in _linears(size).items():
            shapes[f"transformer.h.{layer}.{name}.weight"] = (num_in, num_out)
            shapes[f"transformer.h.{layer}.{name}.bias"] = (num_out,)
    return shapes | {f"transformer.ln_f.{part}": (width,) for part in ("weight", "bias")}


def write_adapter(directory: Path, parameters: str, base: Path) -> int:
    """An fp32 adapter of rank 16 on every linear layer but the head. Returns its weights' bytes."""
    size = SIZES[parameters]
    directory.mkdir(parents=True)
    names = sorted({name.rpartition(".")[2] for name in _linears(size)})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": RANK,
        "lora_alpha": 32, "target_modules": names, "bias": "none", "fan_in_fan_out": size.get("model_type") == "gpt2",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    shapes: Shapes = {}
    is_gpt2 = size.get("model_type") == "gpt2"
    layers = "transformer.h" if is_gpt2 else "model.layers"
    for layer in range(size["n_layer" if is_gpt2 else "num_hidden_layers"]):
        for name, (num_out, num_in) in _linears(size).items():
            prefix = f"base_model.model.{layers}.{layer}.{name}"
            shapes[f"{prefix}.lora_A.weight"] = (RANK, num_in)
            shapes[f"{prefix}.lora_B.weight"] = (num_out, RANK)
    generator = random.Random(2)
    values = [generator.gauss(0, 0.02) for _ in range(1 << 17)]
    block = struct.pack(f"<{len(values)}f", *values)
    return _write(directory / "adapter_model.safetensors", shapes, "F32", block)


def _linears(size: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(out, in) by name."""
    if size.get("model_type") == "gpt2":
        width = size["n_embd"]
        return {
            "attn.c_attn": (3 * width, width), "attn.c_proj": (width, width), "mlp.c_fc": (4 * width, width),
            "mlp.c_proj": (width, 4 * width),
        }  # fmt: skip
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    key_value = hidden // size["num_attention_heads"] * size["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def _write(path: Path, shapes: Shapes, dtype: str, block: bytes) -> int:
    width = 4 if dtype == "F32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + count * width]}
        position += count * width
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, name in enumerate(shapes):
            begin, end = header[name]["data_offsets"]
            remaining = end - begin
            at = number * 7919 * width % len(block)
            while remaining:
                part = block[at : at + remaining]
                file.write(part)
                remaining -= len(part)
                at = 0
    return position

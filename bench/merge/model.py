"""A Llama of a chosen size and an all-linear adapter on disk, without a model in memory.

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

SIZES: dict[str, dict[str, int]] = {
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
}  # fmt: skip
"""Shapes of Llama models, by number of parameters. 1.1B is TinyLlama's, 7B Llama 2's; 0.3B has a few large tensors."""

Shapes = dict[str, tuple[int, ...]]


def write_base(directory: Path, parameters: str) -> int:
    """A bf16 base model in one file. Returns its weights' bytes."""
    size = SIZES[parameters]
    directory.mkdir(parents=True)
    config = {
        **size, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes = _base_shapes(size)
    # bf16 with random sign and mantissa and exponents around 2**-6: plain weights, no infinities.
    generator = random.Random(1)
    high = bytes(0x3C | (generator.getrandbits(1) << 7) for _ in range(1 << 16))
    low = generator.randbytes(1 << 16)
    block = b"".join(bytes(pair) for pair in zip(low, high, strict=True)) * (BLOCK_VALUES >> 16)
    return _write(directory / "model.safetensors", shapes, "BF16", block)


def num_bytes(parameters: str) -> int:
    """Of the base's weights."""
    return 2 * sum(math.prod(shape) for shape in _base_shapes(SIZES[parameters]).values())


def _base_shapes(size: dict[str, int]) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (size["vocab_size"], size["hidden_size"])}
    for layer in range(size["num_hidden_layers"]):
        for name, shape in _linears(size).items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (size["hidden_size"],)
    shapes["model.norm.weight"] = (size["hidden_size"],)
    shapes["lm_head.weight"] = (size["vocab_size"], size["hidden_size"])
    return shapes


def write_adapter(directory: Path, parameters: str, base: Path) -> int:
    """An fp32 adapter of rank 16 on every linear layer but the head. Returns its weights' bytes."""
    size = SIZES[parameters]
    directory.mkdir(parents=True)
    names = sorted({name.rpartition(".")[2] for name in _linears(size)})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": RANK,
        "lora_alpha": 32, "target_modules": names, "bias": "none",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    shapes: Shapes = {}
    for layer in range(size["num_hidden_layers"]):
        for name, (num_out, num_in) in _linears(size).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            shapes[f"{prefix}.lora_A.weight"] = (RANK, num_in)
            shapes[f"{prefix}.lora_B.weight"] = (num_out, RANK)
    generator = random.Random(2)
    values = [generator.gauss(0, 0.02) for _ in range(1 << 17)]
    block = struct.pack(f"<{len(values)}f", *values)
    return _write(directory / "adapter_model.safetensors", shapes, "F32", block)


def _linears(size: dict[str, int]) -> dict[str, tuple[int, int]]:
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

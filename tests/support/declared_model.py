"""A model directory of any size that takes no room: files whose headers declare every tensor, and holes where the weights would
be.

What a check that reads headers alone needs of a model of hundreds of gigabytes; one that reads weights reads zeros, for hours.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SHARD_BYTES = 5 * 10**9
"""Size of the files into which the Hub's large models are cut."""
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": None,
}
"""The sizes of Llama 3 70B."""
MIXTRAL_8X22B: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32768,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": None,
}
"""The sizes of Mixtral 8x22B."""
QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": None,
}
"""The sizes of Qwen3 235B-A22B."""


def declare_model(directory: Path, config: Mapping[str, Any]) -> int:
    """Write config.json and weight files that declare what it asks for; bytes that they claim to be. `directory` must be
    empty."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    # As the files on the Hub hold it, such as one matrix per expert.
    stored = revert_weight_conversion(model, state)
    return declare_tensors(directory, {name: tuple(tensor.shape) for name, tensor in stored.items()})


def declare_tensors(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Weight files and their index for bfloat16 tensors of these shapes; bytes that the tensors would take."""
    shards = list(_shards(shapes))
    weight_map = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += _declare(directory / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    held = 0
    for name, shape in shapes.items():
        size = _bytes(shape)
        if shard and held + size > SHARD_BYTES:
            yield shard
            shard, held = {}, 0
        shard[name] = shape
        held += size
    yield shard


def _declare(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    header, offset = {}, 0
    for name, shape in shapes.items():
        stop = offset + _bytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(path, 8 + len(encoded) + offset)
    return offset


def _bytes(shape: tuple[int, ...]) -> int:
    size = 2
    for length in shape:
        size *= length
    return size

"""A model of a real size, of which only the configuration and the headers exist."""

import json
from pathlib import Path


def write_headers(directory: Path) -> Path:
    """A Llama of 24 layers in bfloat16, with dropout, of whose weights there are holes in a file."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 32000,
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 31999,
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    header = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [32000, 2048], "data_offsets": [0, 131072000]}}
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + 131072000)
    return directory

"""Checks what vLLM requires of the files of a LoRA adapter and of a model, without vLLM, which needs a GPU.

By its sources: the adapter's configuration names `r`, `lora_alpha` and `target_modules`, no module is saved whole, no DoRA; its
tensors are pairs of `lora_A` and `lora_B` of rank `r` under names of PEFT; the rank is at most 16 unless `--max-lora-rank` says
more.
A model is a directory with config.json, safetensors files that hold what the index says, and a tokenizer with a chat template.
"""

import json
from pathlib import Path

from safetensors import safe_open

MAX_LORA_RANK = 16
PREFIX = "base_model.model."


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    with safe_open(file, "pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - not a mapping


def check_adapter(adapter: Path, base: Path) -> None:
    """Raises AssertionError if `--enable-lora --lora-modules NAME=adapter` would refuse it over this base."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert 0 < settings["r"] <= MAX_LORA_RANK
    assert settings["lora_alpha"] > 0
    assert settings["target_modules"]
    assert not settings.get("modules_to_save")
    assert not settings.get("use_dora")
    assert settings.get("bias", "none") == "none"
    shapes, of_base = shapes_in(adapter / "adapter_model.safetensors"), model_shapes(base)
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in shapes}
    assert modules
    for module in modules:
        rows, columns = of_base[f"{module}.weight"]
        assert shapes.pop(f"{PREFIX}{module}.lora_A.weight") == (settings["r"], columns)
        assert shapes.pop(f"{PREFIX}{module}.lora_B.weight") == (rows, settings["r"])
    assert shapes == {}


def model_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model, from all of its files."""
    return {name: shape for file in sorted(model.glob("*.safetensors")) for name, shape in shapes_in(file).items()}


def check_model(model: Path) -> None:
    """Raises AssertionError if `vllm serve model` would miss something."""
    settings = json.loads((model / "config.json").read_text())
    assert settings["architectures"]
    shapes = model_shapes(model)
    assert shapes["model.embed_tokens.weight"] == (settings["vocab_size"], settings["hidden_size"])
    index = model / "model.safetensors.index.json"
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == set(shapes)
    else:
        assert {path.name for path in model.glob("*.safetensors")} == {"model.safetensors"}
    assert (model / "tokenizer.json").is_file()
    has_template = (model / "chat_template.jinja").is_file()
    assert has_template or "chat_template" in json.loads((model / "tokenizer_config.json").read_text())

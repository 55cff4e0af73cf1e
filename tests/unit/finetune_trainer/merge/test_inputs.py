"""Adapters can hold an embedding under several names, or an untrained one, as PEFT saves them for added tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.weights.errors import AdapterTensorError
from finetune_trainer.weights.headers import ADAPTER_FILE
from tests.unit.finetune_trainer.merge import tiny

EMBEDDINGS = ["embed_tokens", "lm_head"]
INPUT, OUTPUT = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


def saved_with_embeddings(directory: Path, config: PreTrainedConfig, trained: set[str], **settings: Any) -> tuple[Path, Path]:
    """Save a base and an adapter with save_embedding_layers. trained: parts of the names of tensors that differ from the base."""
    base = tiny.save_base(directory / "base", config, torch.float32)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"], r=4, **settings))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and any(part in name for part in trained):
                parameter.add_(0.05 * torch.randn(parameter.shape))
    return base, tiny.save_peft(model, directory / "adapter", save_embedding_layers=True)


def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    output = base.with_name("merged")
    merge_adapter(MergeOptions(base, (adapter,), output, None, 1 << 30))
    return load_file(output / "model.safetensors")


def test_an_embedding_under_three_names_is_merged_once(tmp_path: Path) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.llama(), {"lora_", "modules_to_save"}, modules_to_save=EMBEDDINGS)
    names = set(load_file(adapter / ADAPTER_FILE))
    for module in (INPUT, OUTPUT):
        assert {f"{module}.weight", f"{module}.modules_to_save.weight", f"{module}.original_module.weight"} <= names
    values, expected = merged(base, adapter), tiny.peft_merged(base, adapter)
    assert values.keys() == expected.keys()
    assert [name for name in values if not torch.equal(values[name], expected[name])] == []
    stored = load_file(base / "model.safetensors")
    assert not torch.equal(values["lm_head.weight"], stored["lm_head.weight"])
    assert not torch.equal(values["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])


def test_a_plain_name_is_not_needed(tmp_path: Path) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.llama(), {"modules_to_save"}, modules_to_save=EMBEDDINGS)
    tensors = load_file(adapter / ADAPTER_FILE)
    expected = tensors.pop(f"{INPUT}.weight")
    save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    assert torch.equal(merged(base, adapter)["model.embed_tokens.weight"], expected)


@pytest.mark.parametrize("module", [INPUT, OUTPUT])
def test_copies_that_differ_are_refused_by_both_names(tmp_path: Path, module: str) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.llama(), {"modules_to_save"}, modules_to_save=EMBEDDINGS)
    tensors = load_file(adapter / ADAPTER_FILE)
    tensors[f"{module}.modules_to_save.weight"][3, 1] += 1
    save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    with pytest.raises(AdapterTensorError, match=rf"{module}\.weight and {module}\.modules_to_save\.weight"):
        merged(base, adapter)


@pytest.mark.parametrize("removed", [None, f"{INPUT}.weight", f"{OUTPUT}.weight"])
def test_a_tied_base_whose_embedding_nobody_trained_stays_tied_and_does_not_grow(tmp_path: Path, removed: str | None) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.qwen2(), {"lora_"})
    tensors = load_file(adapter / ADAPTER_FILE)
    assert {f"{INPUT}.weight", f"{OUTPUT}.weight"} <= tensors.keys()
    if removed is not None:
        del tensors[removed]
        save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    values = merged(base, adapter)
    stored = load_file(base / "model.safetensors")
    assert values.keys() == stored.keys()
    assert torch.equal(values["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is True
    assert not torch.equal(values["model.layers.0.self_attn.q_proj.weight"], stored["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("trained", [(INPUT, OUTPUT), (OUTPUT,)], ids=["both alike", "one side"])
def test_a_tied_base_is_written_apart_only_if_its_sides_were_trained_apart(trained: tuple[str, ...], tmp_path: Path) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.qwen2(), {"lora_"})
    tensors = load_file(adapter / ADAPTER_FILE)
    for module in trained:
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + 1
    save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    values = merged(base, adapter)
    assert torch.equal(values["model.embed_tokens.weight"], tensors[f"{INPUT}.weight"])
    assert ("lm_head.weight" in values) is (INPUT not in trained)
    assert torch.equal(values.get("lm_head.weight", values["model.embed_tokens.weight"]), tensors[f"{OUTPUT}.weight"])
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is (INPUT in trained)

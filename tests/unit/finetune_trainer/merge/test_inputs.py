"""Adapters that hold an embedding under several names, or one that nobody trained, as PEFT saves them for added tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.weights.errors import AdapterTensorDuplicateError
from finetune_trainer.weights.headers import ADAPTER_FILE
from tests.unit.finetune_trainer.merge import tiny

EMBEDDINGS = ["embed_tokens", "lm_head"]
INPUT, OUTPUT = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


def saved_with_embeddings(directory: Path, config: PreTrainedConfig, trained: set[str], **settings: Any) -> tuple[Path, Path]:
    """A base, and an adapter of it with save_embedding_layers. trained: parts of the names of what differs from the base."""
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
    found, expected = merged(base, adapter), tiny.peft_merged(base, adapter)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    stored = load_file(base / "model.safetensors")
    assert not torch.equal(found["lm_head.weight"], stored["lm_head.weight"])
    assert not torch.equal(found["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])


def test_a_plain_name_is_not_needed(tmp_path: Path) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.llama(), {"modules_to_save"}, modules_to_save=EMBEDDINGS)
    tensors = load_file(adapter / ADAPTER_FILE)
    wanted = tensors.pop(f"{INPUT}.weight")
    save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    assert torch.equal(merged(base, adapter)["model.embed_tokens.weight"], wanted)


@pytest.mark.parametrize("module", [INPUT, OUTPUT])
def test_copies_that_differ_are_refused_by_both_names(tmp_path: Path, module: str) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.llama(), {"modules_to_save"}, modules_to_save=EMBEDDINGS)
    tensors = load_file(adapter / ADAPTER_FILE)
    tensors[f"{module}.modules_to_save.weight"][3, 1] += 1
    save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    with pytest.raises(AdapterTensorDuplicateError, match=rf"{module}\.weight and {module}\.modules_to_save\.weight"):
        merged(base, adapter)


@pytest.mark.parametrize("removed", [None, f"{INPUT}.weight", f"{OUTPUT}.weight"])
def test_a_tied_base_whose_embedding_nobody_trained_stays_tied_and_does_not_grow(tmp_path: Path, removed: str | None) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.qwen2(), {"lora_"})
    tensors = load_file(adapter / ADAPTER_FILE)
    assert {f"{INPUT}.weight", f"{OUTPUT}.weight"} <= tensors.keys()
    if removed is not None:
        del tensors[removed]
        save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    found = merged(base, adapter)
    stored = load_file(base / "model.safetensors")
    assert found.keys() == stored.keys()
    assert torch.equal(found["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is True
    assert not torch.equal(found["model.layers.0.self_attn.q_proj.weight"], stored["model.layers.0.self_attn.q_proj.weight"])


def test_a_tied_base_that_was_trained_as_one_stays_tied(tmp_path: Path) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.qwen2(), {"lora_"})
    tensors = load_file(adapter / ADAPTER_FILE)
    for module in (INPUT, OUTPUT):
        tensors[f"{module}.weight"][7] += 1
    save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    found = merged(base, adapter)
    assert "lm_head.weight" not in found
    assert torch.equal(found["model.embed_tokens.weight"], tensors[f"{INPUT}.weight"])


def test_a_tied_base_of_which_one_side_was_trained_is_written_apart(tmp_path: Path) -> None:
    base, adapter = saved_with_embeddings(tmp_path, tiny.qwen2(), {"lora_"})
    tensors = load_file(adapter / ADAPTER_FILE)
    tensors[f"{OUTPUT}.weight"] = tensors[f"{OUTPUT}.weight"] + 1
    save_file(tensors, adapter / ADAPTER_FILE, {"format": "pt"})
    found = merged(base, adapter)
    stored = load_file(base / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], tensors[f"{OUTPUT}.weight"])
    assert torch.equal(found["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False

"""DoRA divides each row of a weight by its norm: a row of zeros is found in the files, whatever their element type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from finetune_trainer.preflight.model_process import check_model

TARGETS = {"targetModules": ["q_proj", "down_proj"]}


def zeroed(model: Path, module: str, row: int | None, dtype: torch.dtype = torch.float32) -> None:
    loaded = LlamaForCausalLM.from_pretrained(model, dtype=dtype)
    if row is not None:
        with torch.no_grad():
            # Minus zero is zero, too.
            loaded.get_submodule(module).weight[row] = -0.0
    for path in model.glob("*.safetensors*"):
        path.unlink()
    loaded.save_pretrained(model)


def found(context: Any, model: Path, **lora: Any) -> dict[str, Any]:
    method = lora.pop("method", {"type": "DoRA"})
    _, findings = check_model(context({"method": {**method, "lora": TARGETS | lora}, "merge.enabled": False}).plan, model)
    return {finding.rule: finding for finding in findings if finding.severity == "error"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_module_and_its_row_are_named(context: Any, model: Path, dtype: torch.dtype) -> None:
    zeroed(model, "model.layers.1.mlp.down_proj", 5, dtype)
    finding = found(context, model)["dora-zero-row"]
    assert (finding.field, finding.value) == ("spec.method.lora.targetModules", "model.layers.1.mlp.down_proj")
    assert "number 5" in finding.message
    assert "excludeModules" in finding.fix
    assert found(context, model, excludeModules=["model.layers.1.mlp.down_proj"]) == {}


def test_only_dora_divides_and_only_by_adapted_rows(context: Any, model: Path) -> None:
    zeroed(model, "model.layers.1.mlp.up_proj", 5)
    assert found(context, model) == {}
    zeroed(model, "model.layers.1.mlp.down_proj", 5)
    assert found(context, model, method={"type": "LoRA"}) == {}


def test_a_column_of_an_embedding_counts_and_its_rows_do_not(context: Any, model: Path) -> None:
    """DoRA holds the norms of an embedding's columns."""
    zeroed(model, "model.embed_tokens", 3)
    embedding = {"targetModules": ["embed_tokens"]}
    assert found(context, model, **embedding) == {}
    loaded = LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        loaded.model.embed_tokens.weight[:, 7] = 0
    for path in model.glob("*.safetensors*"):
        path.unlink()
    loaded.save_pretrained(model)
    assert "column of zeros (number 7)" in found(context, model, **embedding)["dora-zero-row"].message

"""A fully fine-tuned model is written tensor by tensor, and is what plain transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune_trainer.checkpoint.load import PieceReader
from finetune_trainer.checkpoint.manifest import decode
from tests.support.forked_ranks import run_gang
from tests.support.tiny_model import run_context, tiny_spec, write_tiny_llama

FULL = {"type": "Full", "lora": None}


@pytest.mark.parametrize("tied", [False, True])
def test_a_full_model_in_shards_loads_in_plain_transformers(tmp_path: Path, tied: bool) -> None:
    spec = tiny_spec(method=FULL, training={"maxSteps": 1}, merge={"maxShardSize": "30KB"})
    write_tiny_llama(tmp_path / "models" / "tiny", torch.bfloat16, tied)
    context = run_context(tmp_path, spec)
    assert run_gang(context) == [0, 0]
    result = context.workspace.adapter
    index = json.loads((result / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in result.glob("*.safetensors")}
    loaded, info = AutoModelForCausalLM.from_pretrained(result, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.dtype is torch.bfloat16
    (checkpoint,) = context.workspace.checkpoints.glob("step-*")
    reader = PieceReader(checkpoint, decode((checkpoint / "manifest.json").read_bytes()))
    parameters = dict(loaded.named_parameters())
    assert set(parameters) == reader.names
    for name, parameter in parameters.items():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter, reader.whole(name).to(torch.bfloat16)), name

"""A model of which each rank reads its own shards has the bytes of one loaded whole, and takes less memory."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.checkpoint.state import pieces
from finetune_trainer.model import sharded
from finetune_trainer.model.load_shards import base_name
from finetune_trainer.ranks.gang import joined
from tests.support.small_gang import Unchanged
from tests.support.tiny_model import plan_of, write_tiny_llama
from tests.unit.finetune_trainer.model.sharded_gang import FLAT, FULL, LORA_TIED, gang, spec_of

LORA = {"type": "LoRA", "lora": {"r": 4, "modulesToSave": ["lm_head"]}}
DORA = {"type": "DoRA", "lora": {"r": 4}}
BUILT: dict[str, tuple[dict[str, Any], dict[str, Any], int, torch.dtype, bool]] = {
    "lora-fsdp2": (LORA, {}, 3, torch.bfloat16, False),
    "dora-fsdp2-tied": (DORA, {}, 2, torch.bfloat16, True),
    "full-fsdp2-tied": (FULL, {}, 3, torch.bfloat16, True),
    "lora-fsdp1-tied": (LORA_TIED, FLAT, 2, torch.float32, True),
    "dora-fsdp1": (DORA, {"version": 1}, 3, torch.float32, False),
    "full-fsdp1": (FULL, {"version": 1}, 2, torch.bfloat16, False),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_model_loaded_by_shards_has_the_bytes_of_one_loaded_whole(tmp_path: Path, name: str) -> None:
    method, fsdp, ranks, dtype, tied = BUILT[name]
    base = write_tiny_llama(tmp_path / "base", dtype, tied)
    gang(_build_twice, ranks, tmp_path, spec_of(method, fsdp, ranks), base)


def _build_twice(rank: int, ranks: int, store: str, _: Path, spec: dict[str, Any], base: Path) -> None:
    found = []
    with joined(rank, ranks, rank, store) as joint:
        by_shard = sharded.unloaded_base_model
        for load in (by_shard, lambda *_: None):
            sharded.unloaded_base_model = load  # type: ignore[assignment]
            module = sharded.build(plan_of(spec), base, joint, Unchanged()).module
            found.append(
                {
                    piece.name: (piece.start, piece.holder.requires_grad, piece.parameter_values())
                    for piece in pieces(module, frozen=True)
                }
                | {f"buffer {name}": (0, False, buffer) for name, buffer in module.named_buffers()}
            )
    assert found[0].keys() == found[1].keys()
    assert by_shard(plan_of(spec), base) is not None
    for name, (start, trained, values) in found[0].items():
        assert (start, trained) == found[1][name][:2], name
        assert values.dtype is found[1][name][2].dtype, name
        assert torch.equal(values, found[1][name][2]), name


def test_a_rank_needs_memory_for_its_shard_and_not_for_the_model(tmp_path: Path) -> None:
    large = {"vocab_size": 4096, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 8}
    base = write_tiny_llama(tmp_path / "base", **large)
    num_bytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    gang(_measure, 2, tmp_path, spec_of({"type": "LoRA", "lora": {"r": 4}}, {}, 2), write_tiny_llama(tmp_path / "tiny"), base)
    for path in tmp_path.glob("peak-*"):
        # Half of the model, one layer and a block, where loading it whole takes all of it and the shard next to it.
        assert int(path.read_text()) < num_bytes


def _measure(rank: int, ranks: int, store: str, out: Path, spec: dict[str, Any], tiny: Path, base: Path) -> None:
    with joined(rank, ranks, rank, store) as joint:
        # What libraries allocate once is there before it is measured.
        sharded.build(plan_of(spec), tiny, joint, Unchanged())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trained = sharded.build(plan_of(spec), base, joint, Unchanged())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert trained.pieces
    (out / f"peak-{rank}").write_text(str(peak * 1024))


def test_the_base_models_name_of_a_parameter_inside_peft() -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj."
    assert base_name(f"{prefix}base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"
    assert base_name("base_model.model.lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert base_name("model.norm.weight") == "model.norm.weight"
    assert base_name(f"{prefix}lora_A.default.weight") == "model.layers.0.self_attn.q_proj.lora_A.weight"

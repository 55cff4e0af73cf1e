"""Bytes of weights, gradients and optimizer state against those that two real ranks keep: exactly equal, padding included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.context import RunContext
from tests.support.tiny_model import run_context, tiny_spec, write_tiny_llama
from tests.unit.finetune_memory.ranks import COUNTS, counted_bytes, predicted_bytes

ODD = {"vocab_size": 265, "hidden_size": 36, "intermediate_size": 57, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Sizes that no two ranks can halve."""
FIRST = {"version": 1}


def _cases() -> dict[str, dict[str, dict[str, Any]]]:
    lora = {"method": {"type": "LoRA", "lora": {"r": 3}}}
    full = {"method": {"type": "Full", "lora": None}}
    return {
        "LoRA": lora,
        "LoRA in bf16": {**lora, "training": {"precision": "bf16"}},
        "LoRA on some layers with biases": {
            "method": {
                "type": "LoRA",
                "lora": {"r": 5, "targetModules": ["q_proj", "v_proj"], "layersToTransform": [1], "bias": "all"},
            }
        },
        "LoRA held as the base": {"method": {"type": "LoRA", "lora": {"r": 3, "autocastAdapterDtype": False}}},
        "DoRA": {"method": {"type": "DoRA", "lora": {"r": 3}}},
        "Full": full,
        "Full, one unit": {**full, "parallelism": _sharded({"autoWrapPolicy": "NO_WRAP"})},
        "Full with momentum": {**full, "training": {"optimizer": "SGD"}},
        "LoRA with RAdam": {**lora, "training": {"optimizer": "RAdam"}},
        "LoRA, units by size": {
            **lora,
            "parallelism": _sharded({"autoWrapPolicy": "SIZE_BASED_WRAP", "minNumParams": 5000}),
        },
        "QLoRA": _packed(),
        "QLoRA with plain scales": _packed(doubleQuant=False),
        "QLoRA stored as bytes": _packed(quantStorage="uint8"),
        "FSDP 1, QLoRA": {**_packed(), "parallelism": _sharded(FIRST)},
        "FSDP 1, QDoRA": {"method": {"type": "QDoRA", "lora": {"r": 3}}, "parallelism": _sharded(FIRST)},
        "FSDP 1, LoRA": {**lora, "parallelism": _sharded(FIRST)},
        "FSDP 1, LoRA with original parameters": {
            **lora,
            "parallelism": _sharded({**FIRST, "peftWrapPolicy": False, "useOrigParams": True}),
        },
        "FSDP 1, Full": {**full, "parallelism": _sharded(FIRST)},
        "FSDP 1, Full without original parameters": {**full, "parallelism": _sharded({**FIRST, "useOrigParams": False})},
    }


def _packed(**quantization: Any) -> dict[str, Any]:
    return {"method": {"type": "QLoRA", "lora": {"r": 3}, "quantization": quantization}}


def _sharded(fsdp: dict[str, Any]) -> dict[str, Any]:
    return {"processesPerNode": 2, "fsdp": fsdp}


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunContext]:
    claims = tmp_path_factory.mktemp("claims")
    write_tiny_llama(claims / "models" / "tiny", torch.bfloat16, **ODD)
    return {name: run_context(claims, tiny_spec(**changes)) for name, changes in _cases().items()}


@pytest.fixture(scope="module")
def counted(contexts: dict[str, RunContext], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    directory: Path = tmp_path_factory.mktemp("counted")
    return counted_bytes(contexts, directory)


@pytest.mark.parametrize("name", sorted(_cases()))
def test_every_rank_keeps_what_was_predicted(
    name: str, contexts: dict[str, RunContext], counted: dict[str, list[dict[str, int]]]
) -> None:
    for rank, found in enumerate(counted[name]):
        expected = predicted_bytes(contexts[name], rank)
        assert {kind: found[kind] for kind in COUNTS} == {kind: expected[kind] for kind in COUNTS}, f"rank {rank}"

"""Bytes of weights, gradients and optimizer state against those that two real ranks keep: exactly equal, padding included."""

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.context import RunContext
from tests.support.cases import table
from tests.support.tiny_model import run_context, tiny_spec, write_tiny_llama
from tests.unit.finetune_memory.ranks import COUNTS, counted_bytes, predicted_bytes

ODD = {"vocab_size": 265, "hidden_size": 36, "intermediate_size": 57, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Sizes that no two ranks can halve."""
CASES: dict[str, dict[str, dict[str, Any]]] = table(__file__, "CASES")


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunContext]:
    claims = tmp_path_factory.mktemp("claims")
    write_tiny_llama(claims / "models" / "tiny", torch.bfloat16, **ODD)
    return {name: run_context(claims, tiny_spec(**changes)) for name, changes in CASES.items()}


@pytest.fixture(scope="module")
def counted(contexts: dict[str, RunContext], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    directory: Path = tmp_path_factory.mktemp("counted")
    return counted_bytes(contexts, directory)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_rank_keeps_what_was_predicted(
    name: str, contexts: dict[str, RunContext], counted: dict[str, list[dict[str, int]]]
) -> None:
    for rank, found in enumerate(counted[name]):
        expected = predicted_bytes(contexts[name], rank)
        assert {kind: found[kind] for kind in COUNTS} == {kind: expected[kind] for kind in COUNTS}, f"rank {rank}"

"""Trained rows of an embedding learn where their tokens are read, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import TrainableTokensConfig, get_peft_model
from transformers import LlamaForCausalLM

from finetune_job.failures import Outcome
from finetune_trainer.data.shards import TRAIN, TokenShards, map_tables
from finetune_trainer.inspection.report import read_report
from finetune_trainer.preflight import token_rows as rows_read
from finetune_trainer.roles.preflight import run

RULE = "trained-token-unread"
LORA, OTHER = "method.lora.trainableTokenIndices", "method.settings"


@pytest.fixture
def tokens(context: Any) -> dict[str, int]:
    """A token within records, one that only ends them, and one that no record has."""
    job = context()
    assert run(job).outcome is Outcome.SUCCEEDED
    ends = np.asarray(map_tables(job.workspace.prepared, TRAIN).document_ends)
    ids = TokenShards(job.workspace.prepared, TRAIN).read(0, int(ends[-1]))[0]
    inner = set(np.delete(ids, ends - 1).tolist())
    last = set(ids[ends - 1].tolist()) - inner
    return {
        "read": min(inner),
        "last": min(last),
        "absent": next(token for token in range(300) if token not in set(ids.tolist())),
    }


@pytest.mark.parametrize("at_a_time", [1, 7, 1 << 20])
def test_rows_beside_lora_are_told_of(context: Any, tokens: dict[str, int], monkeypatch: Any, at_a_time: int) -> None:
    monkeypatch.setattr(rows_read, "_BLOCK_TOKENS", at_a_time)
    job = context({LORA: sorted(tokens.values()), "data.maxSequenceLength": 65})
    assert run(job).outcome is Outcome.SUCCEEDED
    report = read_report(job.workspace.model_report)
    assert report is not None
    (finding,) = [finding for finding in report.warnings if finding.rule == RULE]
    assert (finding.field, finding.severity) == (f"spec.{LORA}", "warning")
    assert finding.value == str(min(tokens["last"], tokens["absent"]))
    assert "2 such ids" in finding.message
    assert finding.changes[0].value == [tokens["read"]]
    assert run(context({LORA: [tokens["read"]]})).findings == []


def test_where_nothing_else_is_trained_nothing_is_learnt(context: Any, tokens: dict[str, int]) -> None:
    alone = {"method.type": "TrainableTokens", "method.lora": None}
    result = run(context({**alone, OTHER: {"tokenIndices": [tokens["absent"], tokens["last"]]}}))
    assert result.outcome is Outcome.REFUSED
    assert [(finding.rule, finding.field) for finding in result.findings] == [(RULE, "spec.method.settings.tokenIndices")]
    result = run(context({**alone, OTHER: {"tokenIndices": [tokens["absent"], tokens["read"]]}}))
    assert result.outcome is Outcome.SUCCEEDED
    assert [(finding.rule, finding.severity) for finding in result.findings] == [(RULE, "warning")]


def test_the_row_of_the_padding_learns_nothing_wherever_it_stands(context: Any, tokens: dict[str, int], model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": tokens["read"]}))
    loaded = LlamaForCausalLM.from_pretrained(model)
    adapted = get_peft_model(loaded, TrainableTokensConfig(token_indices=[tokens["read"]], target_modules=["embed_tokens"]))
    ids = torch.tensor([[tokens["read"]] * 4])
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert [bool(each.grad.any()) for each in adapted.parameters() if each.requires_grad] == [False]
    result = run(context({LORA: [tokens["read"]]}))
    (finding,) = [finding for finding in result.findings if finding.rule == RULE]
    assert "padding" in finding.message


def test_rows_that_a_head_shares_learn_from_every_prediction(context: Any, tokens: dict[str, int], model: Path) -> None:
    loaded = LlamaForCausalLM.from_pretrained(model)
    loaded.config.tie_word_embeddings = True
    loaded.tie_weights()
    for path in model.glob("*.safetensors*"):
        path.unlink()
    loaded.save_pretrained(model)
    assert run(context({LORA: [tokens["absent"]]})).findings == []

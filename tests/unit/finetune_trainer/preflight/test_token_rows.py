"""Tokenizer and embedding together: rows that nobody trained, rows that are not there, and rows that stand for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from finetune_job.failures import Outcome
from finetune_trainer.inspection.report import read_report
from finetune_trainer.roles.preflight import run
from tests.unit.finetune_trainer.data.chat_templates import CHATML
from tools import quickstart

MARKERS = ["<|im_start|>", "<|im_end|>"]
CHAT = {"messages": [{"role": "user", "content": "def name(value):"}, {"role": "assistant", "content": "Return the value."}]}
CHANGES = {"data.format": "Chat", "data.lossOn": None, "data.chatTemplate": CHATML.template}


def rewritten(model: Path, tokens: list[str], **how: Any) -> tuple[LlamaForCausalLM, list[int]]:
    """The tiny model with `tokens` added to its tokenizer and its embedding resized; save it to go on."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(model)
    loaded = LlamaForCausalLM.from_pretrained(model)
    loaded.resize_token_embeddings(len(tokenizer), mean_resizing=False, **how)
    return loaded, tokenizer.convert_tokens_to_ids(tokens)


def save(loaded: LlamaForCausalLM, model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    loaded.save_pretrained(model)


@pytest.fixture
def chats(claims: Path) -> None:
    for name in ("train", "validation"):
        question, answer = CHAT["messages"]
        held_apart = {"messages": [question, {**answer, "content": f"{answer['content']} ({name})"}]}
        quickstart.write_json_lines(claims / "data" / f"{name}.jsonl", [held_apart] * 16)


def found(job: Any) -> dict[str, Any]:
    result = run(job)
    assert result.outcome is Outcome.SUCCEEDED, result
    return {finding.rule: finding for finding in result.findings if finding.rule.startswith(("chat", "token", "model"))}


@pytest.mark.usefixtures("chats")
@pytest.mark.parametrize("how", ["zeros", "equal", "trained"])
def test_markers_that_the_base_never_learnt_are_named(context: Any, model: Path, how: str) -> None:
    loaded, ids = rewritten(model, MARKERS)
    with torch.no_grad():
        for weight in (loaded.model.embed_tokens.weight, loaded.lm_head.weight):
            weight[ids] = torch.zeros(2, 32) if how == "zeros" else torch.ones(2, 32)
            weight[ids[0]] += how == "trained"
    save(loaded, model)
    findings = found(context(CHANGES))
    if how == "trained":
        assert "chat-token-untrained" not in findings
        return
    finding = findings["chat-token-untrained"]
    assert (finding.severity, finding.value) == ("warning", str(ids[0]))
    assert "'<|im_start|>', '<|im_end|>'" in finding.message
    assert str(ids) in finding.fix
    if how == "zeros":
        saved = {"method.lora.modulesToSave": ["lm_head", "embed_tokens"]}
        assert "chat-token-untrained" not in found(context(CHANGES | saved))
    else:
        rows = found(context(CHANGES | {"method.lora.trainableTokenIndices": ids}))
        # Rows of an untied head stay as they are where only those of the embedding are trained.
        assert "lm_head" in rows["chat-token-untrained"].message


@pytest.mark.usefixtures("chats")
@pytest.mark.parametrize("untrained", ["all", "embedding", "tied", "embedding, FSDP 1"])
def test_the_changes_have_rows_trained_that_nobody_has(context: Any, model: Path, untrained: str) -> None:
    loaded, ids = rewritten(model, MARKERS)
    with torch.no_grad():
        loaded.model.embed_tokens.weight[ids] = 0
        if untrained == "all":
            loaded.lm_head.weight[ids] = 0
    if untrained == "tied":
        loaded.config.tie_word_embeddings = True
        loaded.tie_weights()
    save(loaded, model)
    changes = CHANGES | ({"parallelism.fsdp.version": 1} if "FSDP 1" in untrained else {})
    job = context(changes)
    assert "chat-token-untrained" in found(job)
    report = read_report(job.workspace.model_report)
    assert report is not None
    finding = next(finding for finding in report.warnings if finding.rule == "chat-token-untrained")
    assert ("trainableTokenIndices" in finding.fix) == ("FSDP 1" not in untrained)
    (change,) = finding.changes
    if untrained == "all":
        assert (change.field, change.value) == ("spec.method.lora.modulesToSave", ["embed_tokens", "lm_head"])
    elif untrained == "embedding, FSDP 1":
        # It refuses rows in float32 next to an embedding in 16 bits.
        assert (change.field, change.value) == ("spec.method.lora.modulesToSave", ["embed_tokens"])
    else:
        assert (change.field, change.value) == ("spec.method.lora.trainableTokenIndices", ids)
    assert "chat-token-untrained" not in found(context(changes | {change.field.removeprefix("spec."): change.value}))


@pytest.mark.usefixtures("chats")
def test_an_embedding_that_is_padded_to_a_multiple_is_fine(context: Any, model: Path) -> None:
    loaded, _ = rewritten(model, MARKERS, pad_to_multiple_of=64)
    assert loaded.config.vocab_size % 64 == 0
    save(loaded, model)
    assert set(found(context(CHANGES))) == {"chat-stop-token-unknown"}


@pytest.mark.usefixtures("chats")
def test_tokens_without_a_row_are_refused_where_the_data_uses_them(context: Any, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS})
    tokenizer.save_pretrained(model)
    result = run(context(CHANGES))
    assert result.outcome is Outcome.REFUSED
    finding = next(finding for finding in result.findings if finding.severity == "error")
    assert finding.rule == "tokenizer-beyond-vocabulary"
    assert "the data uses token" in finding.message


def test_tokens_without_a_row_that_no_record_holds_are_a_warning(context: Any, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.save_pretrained(model)
    assert found(context())["tokenizer-beyond-vocabulary"].severity == "warning"


def test_an_embedding_of_another_size_than_config_json_says_is_refused(context: Any, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    result = run(context())
    assert result.outcome is Outcome.REFUSED
    assert "model-weights-incomplete" in {finding.rule for finding in result.findings}

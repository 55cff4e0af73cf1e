"""Tokens that a job adds: what preflight refuses and tells, and whose rows are trained afterwards."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from finetune_job.failures import Outcome
from finetune_job.plan.run_plan import AddedTokenPlan
from finetune_trainer.added_tokens import AddedTokens, read_added_tokens, with_trained_rows
from finetune_trainer.context import RunContext
from finetune_trainer.errors import ModelError
from finetune_trainer.files import temporary_beside
from finetune_trainer.inspection.report import read_report
from finetune_trainer.model import base_with_tokens
from finetune_trainer.preflight import added_tokens
from finetune_trainer.preflight.model_process import ModelCheckError, ModelCheckKilledError
from finetune_trainer.processes.child import Child, ChildEnd, wait_for_answer
from finetune_trainer.roles.preflight import run
from tests.support.documented import ROOT, as_written, blocks_of
from tests.support.tiny_model import plan_of, tiny_spec
from tools import quickstart

TOOL, STEP = {"content": "<|tool|>", "special": True}, {"content": "<step>"}
ADDED = {"model.addedTokens": [TOOL, STEP]}
START_PROGRAM = added_tokens._start
"""What the tests of this folder replace by a fork."""


@pytest.fixture
def records(claims: Path) -> None:
    for name in ("train", "validation"):
        pairs = [{"prompt": f"{name} {number}<|tool|>", "completion": f"{number}<step>"} for number in range(128)]
        quickstart.write_json_lines(claims / "data" / f"{name}.jsonl", pairs)


def findings(context: Any, changes: dict[str, Any]) -> dict[str, Any]:
    return {finding.rule: finding for finding in run(context(changes)).findings}


@pytest.mark.usefixtures("records")
def test_rows_of_embedding_and_head_are_trained(context: Any) -> None:
    job = context(ADDED)
    result = run(job)
    assert result.outcome is Outcome.SUCCEEDED
    report = read_report(job.workspace.model_report)
    assert report is not None
    rows = {name: shape for name, shape in report.trainable.items() if "tokens_delta" in name}
    assert {(name.split(".token_adapter")[0].rpartition(".")[2], shape[0]) for name, shape in rows.items()} == {
        ("embed_tokens", 2),
        ("lm_head", 2),
    }
    assert "model.safetensors.index.json" in {path.name for path in job.workspace.base_with_tokens.iterdir()}
    assert report.warnings == ()
    added = read_added_tokens(job.workspace.added_tokens)
    assert added is not None
    (chosen,) = [each for each in report.batches if each.field == "spec.method.lora.trainableTokenIndices"]
    assert chosen.value == list(added.ids)
    assert chosen.reason == "the rows of spec.model.addedTokens"
    assert json.loads(result.facts["batches"])[-1]["value"] == list(added.ids)


@pytest.mark.usefixtures("records")
def test_a_token_that_ends_every_record_is_read(context: Any) -> None:
    """It is never followed by another, and what predicts it is trained all the same."""
    saved = {"method.lora.modulesToSave": ["lm_head"]}
    found = findings(context, {"model.addedTokens": [STEP]} | saved)
    assert {rule for rule in found if "token" in rule} == set()


def test_a_base_without_known_rows_is_refused(context: Any, model: Path) -> None:
    """A head with a bias has a value for each token that an adapter holds only with the whole head."""
    import torch
    from safetensors.torch import load_file, save_file

    index = json.loads((model / "model.safetensors.index.json").read_text())
    shard = model / index["weight_map"]["lm_head.weight"]
    tensors = load_file(shard)
    tensors["lm_head.bias"] = torch.zeros(tensors["lm_head.weight"].shape[0], dtype=tensors["lm_head.weight"].dtype)
    save_file(tensors, shard, metadata={"format": "pt"})
    index["weight_map"]["lm_head.bias"] = shard.name
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    found = findings(context, ADDED)["added-tokens-without-rows"]
    assert (found.severity, found.field) == ("error", "spec.model.addedTokens")
    assert "lm_head.bias has a value for each token" in found.message
    assert "modulesToSave names lm_head" in found.message
    assert "added-tokens-without-rows" not in findings(context, ADDED | {"method.lora.modulesToSave": ["lm_head"]})


@pytest.mark.usefixtures("records")
def test_what_is_refused_leaves_no_base_behind_and_no_other_finding(context: Any) -> None:
    """Neither where the tokens are refused, so that there is no base to look at, nor where something else is."""
    end = json.loads((context().source_model / "tokenizer_config.json").read_text())["eos_token"]
    job = context({"model.addedTokens": [TOOL, {"content": end}]})
    assert [found.rule for found in run(job).findings] == ["added-token-known"]
    assert not job.workspace.base_with_tokens.exists()
    job = context(ADDED | {"method.lora.targetModules": ["no_such_module"]})
    assert run(job).outcome is Outcome.REFUSED
    assert not job.workspace.base_with_tokens.exists()
    assert not job.workspace.added_tokens.exists()


def test_a_tokenizer_that_does_not_keep_a_token_is_refused(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes its files without what was added."""
    monkeypatch.setattr(PreTrainedTokenizerFast, "add_tokens", lambda *_arguments, **_named: 0)
    found = findings(context, ADDED)["added-token-not-kept"]
    assert (found.severity, found.value) == ("error", "<|tool|>")
    assert "does not take '<|tool|>' for one token" in found.message


def test_a_tokenizer_that_changes_other_texts_is_refused(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PreTrainedTokenizerFast.save_pretrained

    def lower(self: Any, directory: Any, **named: Any) -> Any:
        written = real(self, directory, **named)
        path = Path(directory) / "tokenizer.json"
        content = json.loads(path.read_text())
        content["normalizer"] = {"type": "Lowercase"}
        path.write_text(json.dumps(content))
        return written

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", lower)
    found = findings(context, ADDED)["added-token-not-kept"]
    assert "tokenises other texts differently than before" in found.message


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("tied", "lora", "message", "field", "value"),
    [
        (True, {"modulesToSave": ["embed_tokens"]}, "no row of lm_head,", "modulesToSave", ["embed_tokens", "lm_head"]),
        (True, {"modulesToSave": ["lm_head"]}, "no row of embed_tokens,", "modulesToSave", ["lm_head", "embed_tokens"]),
        (True, {"targetModules": ["q_proj", "lm_head"]}, "the adapter of lm_head", "targetModules", ["q_proj"]),
        (
            True,
            {"targetModules": ["q_proj", "lm_head"], "trainableTokenIndices": [5]},
            "the adapter of lm_head",
            "targetModules",
            ["q_proj"],
        ),
        (True, {"targetModules": ["model.embed_tokens", "q_proj"]}, "the adapter of embed_tokens", "targetModules", ["q_proj"]),
        (False, {"targetModules": ["q_proj", "embed_tokens"]}, "the adapter of embed_tokens", "targetModules", ["q_proj"]),
        (False, {"targetModules": ["embed_tokens", "lm_head"]}, "embed_tokens and lm_head would", "targetModules", None),
        (False, {"modulesToSave": ["lm_head"], "targetModules": ["embed_tokens"]}, "of embed_tokens", "targetModules", None),
    ],
)
def test_rows_that_no_adapter_holds_are_refused(
    context: Any, model: Path, tied: bool, lora: dict[str, Any], message: str, field: str, value: list[str] | None
) -> None:
    """A head that shares the embedding's values loses them where one of the two is saved; LoRA of rows holds differences; and
    rows of other tokens are not theirs.
    """
    if tied:
        tie(model)
    changes = ADDED | {f"method.lora.{name}": names for name, names in lora.items()}
    found = findings(context, changes)["added-tokens-untrained"]
    assert (found.severity, found.field) == ("error", "spec.model.addedTokens")
    assert message in found.message
    assert [(change.field, change.value) for change in found.changes] == [(f"spec.method.lora.{field}", value)]
    applied = changes | {change.field.removeprefix("spec."): change.value for change in found.changes}
    assert not {rule for rule, each in findings(context, applied).items() if each.severity == "error"}


@pytest.mark.usefixtures("records")
def test_a_token_on_the_row_of_padding_is_refused(context: Any, model: Path) -> None:
    """A base may have padding of which its tokenizer knows nothing; torch gives that row no gradient where it is read."""
    known = max(PreTrainedTokenizerFast.from_pretrained(model).get_vocab().values())
    config = json.loads((model / "config.json").read_text())
    for padding, expected in ((known + 2, "<step>"), (known, None)):
        (model / "config.json").write_text(json.dumps({**config, "pad_token_id": padding}))
        found = findings(context, ADDED).get("added-tokens-untrained")
        assert (found and found.value) == expected
        if found is not None:
            assert found.severity == "error"
            assert f"'<step>' is token {padding}, pad_token_id in config.json" in found.message


def tie(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    tied = AutoModelForCausalLM.from_pretrained(model)
    tied.lm_head.weight = tied.get_input_embeddings().weight
    tied.config.tie_word_embeddings = True
    for path in model.glob("*.safetensors*"):
        path.unlink()
    tied.save_pretrained(model)


def test_a_base_whose_files_are_not_all_named_is_refused(context: Any, model: Path) -> None:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    last = max(index["weight_map"].values())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    found = findings(context, ADDED)["added-tokens-without-rows"]
    assert "is not among them. Fetch the model again." in found.message


def test_a_process_that_is_killed_leaves_nothing(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for want of memory, half-way through the weights."""

    def killed(*_arguments: Any, **_named: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(base_with_tokens, "write_with_rows", killed)
    job = context(ADDED)
    with pytest.raises(ModelCheckKilledError, match=r"adds tokens to the base model was killed \(SIGKILL\)"):
        run(job)
    assert [path.name for path in job.workspace.root.iterdir() if "added" in path.name] == []


def test_a_process_that_is_killed_while_it_writes_the_record_leaves_nothing(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, content: bytes) -> None:
        temporary_beside(path).write_bytes(content[:20])
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(base_with_tokens, "write_durably", killed)
    job = context(ADDED)
    with pytest.raises(ModelCheckKilledError):
        run(job)
    assert [path.name for path in job.workspace.root.iterdir() if "added" in path.name] == []


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (-9, ModelCheckKilledError, "was killed"),
        (1, ModelCheckError, "exited with status 1"),
        (0, ModelCheckError, "answered with something other than findings"),
    ],
)
def test_a_process_that_does_not_answer_is_no_verdict(
    context: Any, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], message: str
) -> None:
    def answered(child: Child, seconds: float) -> ChildEnd:
        wait_for_answer(child, seconds)
        return ChildEnd(code, b"[nonsense")

    monkeypatch.setattr("finetune_trainer.preflight.model_process.wait_for_answer", answered)
    with pytest.raises(error, match=message):
        run(context(ADDED))


def test_a_program_of_its_own_makes_it(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(added_tokens, "_start", START_PROGRAM)
    job = context(ADDED)
    found, added = added_tokens.add_tokens(job)
    assert found == []
    assert added is not None
    assert added.ids == (added.ids[0], added.ids[0] + 1)
    assert (job.base_model, job.source_model) == (job.workspace.base_with_tokens, job.path(job.plan.model.location))


def test_a_turn_has_to_end_where_generation_stops(context: Any, claims: Path) -> None:
    """The recipe of a base without chat tokens: its markers are added, and one of them ends turns."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for name in ("train", "validation"):
        chats = [{"messages": [*turns, {"role": "user", "content": f"{name} {number}"}, turns[1]]} for number in range(128)]
        quickstart.write_json_lines(claims / "data" / f"{name}.jsonl", chats)
    begin, end = {"content": "<|im_start|>", "special": True}, {"content": "<|im_end|>", "special": True}
    chat = {"data.format": "Chat", "data.lossOn": None, "data.chatTemplate": "ChatML", "data.maxSequenceLength": 256}
    found = findings(context, chat | {"model.addedTokens": [begin, end]})["chat-stop-token-unknown"]
    assert "added token at which generation would not stop" in found.message
    ((field, value),) = [(change.field, change.value) for change in found.changes]
    assert (field, value) == ("spec.model.addedTokens", [begin, {**end, "stop": True}])
    assert findings(context, chat | {"model.addedTokens": value}) == {}


SAVED_HEAD = {"method": {"type": "LoHa", "settings": {"modulesToSave": ["lm_head"]}}, "merge": {"enabled": False}}


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("changes", "rule", "severity", "value", "said"),
    [
        ({"model.addedTokens": [TOOL, {"content": "<|endoftext|>"}]}, "added-token-known", "error", "<|endoftext|>", "has"),
        ({"model.addedTokens": [TOOL, {"content": "<|never|>"}]}, "added-token-unread", "warning", "<|never|>", ""),
        ({"model.addedTokens": [{"content": "<|never|>"}]}, "added-token-unread", "warning", "<|never|>", ""),
        (ADDED | SAVED_HEAD, "added-tokens-untrained", "error", "<|tool|>", "trains no row of embed_tokens, so"),
    ],
)
def test_the_changes_of_findings_about_added_tokens_clear_them(
    context: Any, changes: dict[str, Any], rule: str, severity: str, value: str, said: str
) -> None:
    found = findings(context, changes)[rule]
    assert (found.severity, found.field, found.value) == (severity, "spec.model.addedTokens", value)
    assert said in found.message
    assert found.changes
    applied = changes | {change.field.removeprefix("spec."): change.value for change in found.changes}
    assert not {each for each in findings(context, applied) if each.startswith("added-")}


def test_the_tokens_of_the_page_are_added(context: Any) -> None:
    (block,) = blocks_of(ROOT / "docs/how-to/training.md", "yaml", "Records")
    tokens = yaml.safe_load(as_written(block))["spec"]["model"]["addedTokens"]
    job = context({"model.addedTokens": tokens})
    assert run(job).outcome is Outcome.SUCCEEDED
    found = read_added_tokens(job.workspace.added_tokens)
    assert found is not None
    assert [*found.id_of] == ["<|tool|>", "<|end_of_turn|>", "<step>"]
    settings = json.loads((job.workspace.base_with_tokens / "generation_config.json").read_text())
    assert settings["eos_token_id"][-1] == found.id_of["<|end_of_turn|>"]


MODEL = {"addedTokens": [TOOL, STEP]}


def made(head: str | None) -> AddedTokens:
    return AddedTokens(
        tokens=tuple(AddedTokenPlan(**each) for each in (TOOL, STEP)),
        ids=(300, 299),
        num_rows=301,
        has_more_rows=True,
        embedding="embed_tokens",
        head="lm_head",
        separate_head=head,
    )


@pytest.mark.parametrize(
    ("written", "head", "rows", "separate"),
    [
        ({}, None, (299, 300), {}),
        ({"trainableTokenIndices": [5, 300]}, None, (5, 299, 300), {}),
        ({}, "lm_head", (299, 300), {"embed_tokens": (299, 300), "lm_head": (299, 300)}),
        ({"trainableTokenIndices": [5]}, "lm_head", (5, 299, 300), {"embed_tokens": (5, 299, 300), "lm_head": (299, 300)}),
        ({"modulesToSave": ["lm_head"]}, "lm_head", (299, 300), {}),
        ({"modulesToSave": ["lm_head"]}, None, (), {}),
        ({"modulesToSave": ["model.embed_tokens"]}, "lm_head", (), {"lm_head": (299, 300)}),
        ({"targetModules": ["embed_tokens", "q_proj"]}, None, (), {}),
        ({"modulesToSave": ["embed_tokens", "lm_head"]}, "lm_head", (), {}),
    ],
)
def test_rows_of_what_nothing_else_trains_are_trained(
    written: dict[str, Any], head: str | None, rows: tuple[int, ...], separate: dict[str, tuple[int, ...]]
) -> None:
    plan = with_trained_rows(plan_of(tiny_spec(model=MODEL, method={"lora": {"r": 4, **written}})), made(head))
    assert plan.method.lora is not None
    assert (plan.method.lora.trainable_token_indices, plan.method.lora.separate_token_rows) == (rows, separate)


@pytest.mark.parametrize(
    ("settings", "head", "expected"),
    [
        ({"tokenIndices": [3]}, None, {"tokenIndices": [3, 299, 300]}),
        ({"tokenIndices": [3]}, "lm_head", {"tokenIndices": [3, 299, 300], "targetModules": ["embed_tokens", "lm_head"]}),
        ({"tokenIndices": [3], "targetModules": ["wte"]}, "lm_head", {"tokenIndices": [3, 299, 300], "targetModules": ["wte"]}),
    ],
)
def test_trainable_tokens_trains_them_too(settings: dict[str, Any], head: str | None, expected: dict[str, Any]) -> None:
    spec = tiny_spec(model=MODEL) | {"method": {"type": "TrainableTokens", "settings": settings}}
    plan = with_trained_rows(plan_of(spec), made(head))
    assert plan.method.adapter is not None
    assert plan.method.adapter.settings == expected


def test_full_fine_tuning_needs_no_rows() -> None:
    plan = plan_of(tiny_spec(model=MODEL) | {"method": {"type": "Full"}})
    assert with_trained_rows(plan, made("lm_head")) == plan


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": [300]},
        {"ids": [300, 300]},
        {"ids": [300, 301]},
        {"ids": [-1, 300]},
        {"ids": [300, 299, 298]},
        {"tokens": [STEP, TOOL]},
        {"tokens": [TOOL, {"content": "<other>"}]},
    ],
)
def test_a_record_of_others_is_no_record(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """All who can write to the workspace can put another one there."""
    plan = plan_of(tiny_spec(model={"addedTokens": [TOOL, STEP]}))
    job = RunContext(plan, "", tmp_path, 0)
    job.workspace.root.mkdir(parents=True)
    content = json.loads(made("lm_head").model_dump_json())
    job.workspace.added_tokens.write_text(json.dumps(content))
    assert job.with_trained_rows().plan.method.lora is not None
    job.workspace.added_tokens.write_text(json.dumps(content | wrong))
    with pytest.raises(ModelError, match=r"preflight.s record"):
        job.with_trained_rows()

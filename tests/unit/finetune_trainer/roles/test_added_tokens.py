"""Jobs that add tokens, from preflight to the merged model, against transformers and PEFT by hand."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune_job.failures import EXIT_CODES, FailureClass, Outcome
from finetune_job.plan.digest import canonical_json
from finetune_trainer.__main__ import main
from finetune_trainer.added_tokens import read_added_tokens
from finetune_trainer.context import RunContext, read_plan
from finetune_trainer.errors import ModelError
from finetune_trainer.inspection import source_model
from finetune_trainer.inspection.audit import inspect_run
from finetune_trainer.inspection.report import read_report
from finetune_trainer.preflight import added_tokens, job_steps
from finetune_trainer.roles import audit
from finetune_trainer.roles.merge import merge
from finetune_trainer.roles.preflight import run
from tests.support.forked_base import start_forked
from tests.support.forked_ranks import run_gang
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama
from tools import quickstart

TOKENS = [{"content": f"<|{number}|>", "special": number % 2 == 0, "stop": number == 8} for number in range(10)]
"""257 tokens and these are more than the 264 rows of the tiny model."""


def job(root: Path, *, tied: bool, num_ranks: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> RunContext:
    """Prepared by preflight."""
    spec = tiny_spec(parallelism={"processesPerNode": num_ranks}) | changes
    spec["model"] = {**spec["model"], "addedTokens": TOKENS}
    spec["preflight"] = {"rehearsal": "Skip"}
    for claim in ("models", "data", "results", "workspace"):
        (root / claim).mkdir(parents=True)
    write_tiny_llama(root / "models/tiny", dtype, tie_word_embeddings=tied)
    for name in ("train", "validation"):
        pairs = [
            {"prompt": f"{name} {number} <|{number % 10}|>", "completion": f"<|{(number + 1) % 10}|> {number}"}
            for number in range(40)
        ]
        quickstart.write_json_lines(root / "data" / f"{name}.jsonl", pairs)
    encoded = canonical_json(plan_of(spec)).encode()
    (root / "plan.json").write_bytes(encoded)
    digest = hashlib.sha256(encoded).hexdigest()
    context = RunContext(read_plan(root / "plan.json", digest), digest, root, 0)
    result = run(context)
    assert result.outcome is Outcome.SUCCEEDED, result
    return context.with_trained_rows()


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """To start the processes that write the base and prepare data takes longer than their work here."""
    monkeypatch.setattr(added_tokens, "_start", start_forked)
    monkeypatch.setattr(job_steps, "prepare", partial(job_steps.prepare, num_workers=0))


def trained(context: RunContext) -> None:
    assert run_gang(context) == [0] * context.plan.parallelism.world_size
    assert merge(context).outcome is Outcome.SUCCEEDED


def arguments_of(context: RunContext) -> list[str]:
    plan = context.claims_root / "plan.json"
    given = {"--plan": plan, "--plan-sha256": context.plan_sha256, "--claims-root": context.claims_root}
    return [str(part) for pair in given.items() for part in pair]


def by_hand(context: RunContext) -> dict[str, torch.Tensor]:
    """The base as the job names it, resized, with the adapter that the job has made."""
    tokenizer = AutoTokenizer.from_pretrained(context.output.adapter)
    base = AutoModelForCausalLM.from_pretrained(context.source_model)
    base.resize_token_embeddings(len(tokenizer))
    merged = PeftModel.from_pretrained(base, context.output.adapter).merge_and_unload()
    return dict(merged.state_dict())


def read_tokens(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(each["content"], add_special_tokens=False)["input_ids"] for each in TOKENS]


@pytest.mark.parametrize("tied", [True, False])
def test_the_merged_model_is_what_peft_makes_of_the_resized_base(tmp_path: Path, tied: bool) -> None:
    context = job(tmp_path, tied=tied)
    trained(context)
    expected = by_hand(context)
    merged = AutoModelForCausalLM.from_pretrained(context.output.merged)
    found = dict(merged.state_dict())
    assert {name for name in expected if not torch.equal(expected[name], found[name])} == set()
    assert found["lm_head.weight"].shape == (267, 32)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"]) is tied
    # Every new row was moved, each by itself.
    start = AutoModelForCausalLM.from_pretrained(context.base_model).state_dict()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        rows = found[name][257:]
        assert (rows != start[name][257:]).any(dim=1).all()
        assert len({tuple(row.tolist()) for row in rows}) == 10
    for directory in (context.output.merged, context.output.adapter):
        assert read_tokens(AutoTokenizer.from_pretrained(directory)) == [[257 + number] for number in range(10)]
    assert AutoConfig.from_pretrained(context.output.merged).tie_word_embeddings is tied
    assert json.loads(context.output.verification.read_text())["passed"] is True


def test_card_and_adapter_say_how_to_load_them(tmp_path: Path) -> None:
    context = job(tmp_path, tied=True)
    trained(context)
    card = context.output.model_card.read_text()
    assert "## Added tokens" in card
    assert "| `<\\|3\\|>` | 260 | no |" in card
    assert "Turns end with 265: with the adapter, add it to the `eos_token_id`" in card
    assert json.loads((context.output.merged / "generation_config.json").read_text())["eos_token_id"] == [256, 265]
    assert "base.resize_token_embeddings(267)\n" in card
    # The way of the card for a base that the Hub has: the adapter's tokenizer says how many rows there are.
    settings = context.output.adapter / "adapter_config.json"
    content = json.loads(settings.read_text()) | {"base_model_name_or_path": str(context.source_model)}
    settings.write_text(json.dumps(content))
    loaded = AutoPeftModelForCausalLM.from_pretrained(context.output.adapter)
    merged = AutoModelForCausalLM.from_pretrained(context.output.merged)
    ids = torch.tensor([[257, 66, 266]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["Full", "TrainableTokens"])
def test_other_methods_add_them_too(tmp_path: Path, method: str) -> None:
    """On two ranks, in the type that models are published in."""
    of_method: dict[str, Any] = {"type": method}
    if method == "TrainableTokens":
        of_method["settings"] = {"tokenIndices": [65]}
    context = job(tmp_path, tied=False, num_ranks=2, dtype=torch.bfloat16, method=of_method)
    trained(context)
    merged = AutoModelForCausalLM.from_pretrained(context.output.merged)
    start = AutoModelForCausalLM.from_pretrained(context.base_model).state_dict()
    for name, tensor in merged.state_dict().items():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert tensor.shape == (267, 32)
            assert (tensor[257:] != start[name][257:]).any(dim=1).all()
            assert torch.equal(tensor[:60], start[name][:60]) is (method != "Full")
    assert read_tokens(AutoTokenizer.from_pretrained(context.output.merged)) == [[257 + number] for number in range(10)]
    assert json.loads((context.output.merged / "config.json").read_text())["vocab_size"] == 267


@pytest.mark.parametrize("record", ["of another base", "nonsense"])
def test_another_preflight_knows_nothing_of_the_rows_of_an_earlier_one(tmp_path: Path, record: str) -> None:
    """As a process, which begins with what is on the workspace."""
    context = job(tmp_path, tied=False)
    if record == "nonsense":
        context.workspace.added_tokens.write_text("[]")
    base = AutoTokenizer.from_pretrained(context.source_model)
    base.add_tokens(["known"])
    base.save_pretrained(context.source_model)
    log = tmp_path / "log"
    assert main(["preflight", *arguments_of(context), "--termination-log", str(log)]) == 0
    added = read_added_tokens(context.workspace.added_tokens)
    report = read_report(context.workspace.model_report)
    assert added is not None
    assert report is not None
    assert added.ids == tuple(range(258, 268))
    assert [choice.value for choice in report.batches if choice.field.endswith("trainableTokenIndices")] == [list(added.ids)]
    assert {shape[0] for name, shape in report.trainable.items() if "tokens_delta" in name} == {10}


def changed_source(source: Path, change: str) -> None:
    """What the job names is another base now, of which the copy with added tokens knows nothing."""
    path = source / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    embedding = tensors["model.embed_tokens.weight"]
    if change == "known row":
        embedding[256, 31] += 1
    elif change == "row of an added token":  # it had been to spare, and nothing was made of it
        embedding[260] += 1
    elif change == "last weight":
        tensors["model.norm.weight"][-1] += 1
    elif change == "element type":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    elif change == "other tensors":
        tensors["model.more.weight"] = torch.zeros(2)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("nothing", ""),
        ("row of an added token", ""),
        ("known row", "values of model.embed_tokens.weight that differ from the base"),
        ("last weight", "values of model.norm.weight that differ from the base"),
        ("element type", "values of model.norm.weight that differ from the base"),
        ("other tensors", "different tensors from the base"),
    ],
)
def test_an_audit_compares_the_base_that_the_job_names_with_what_was_made_of_it(
    tmp_path: Path, change: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_model, "_BLOCK_BYTES", 1000)
    context = job(tmp_path, tied=True)
    changed_source(context.source_model, change)
    findings = [each for each in inspect_run(context).findings if each.field == "spec.model.source"]
    assert [each.rule for each in findings] == ["audit-base-differs"] * bool(told)
    assert all(told in each.message and str(context.source_model) in each.message for each in findings)


def test_an_audit_says_if_the_base_that_the_job_names_is_gone_or_not_readable(tmp_path: Path) -> None:
    context = job(tmp_path, tied=True)
    path = context.source_model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (finding,) = [each for each in inspect_run(context).findings if each.field == "spec.model.source"]
    assert (finding.rule, "cannot be read" in finding.message) == ("audit-base-differs", True)
    shutil.rmtree(context.source_model)
    (finding,) = [each for each in inspect_run(context).findings if each.field == "spec.model.source"]
    assert (finding.rule, "is gone" in finding.message) == ("audit-not-proven", True)


def test_nothing_is_trained_without_the_ids_of_added_tokens(tmp_path: Path) -> None:
    """LoRA of the layers alone would be trained, and look like a success."""
    context = job(tmp_path, tied=False)
    record = context.workspace.added_tokens
    record.unlink()
    with pytest.raises(ModelError, match=r"is missing; it records the ids of the tokens in spec\.model\.addedTokens"):
        context.with_trained_rows()
    log = tmp_path / "log"
    assert main(["train", *arguments_of(context), "--termination-log", str(log)]) == EXIT_CODES[FailureClass.USER_MODEL]
    assert str(record) in json.loads(log.read_text())["message"]
    # What looks at a run that was interrupted before it has them does without.
    assert audit.main(["look", *arguments_of(context)]) == 0

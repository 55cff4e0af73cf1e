"""Hostile tokenizer files, chat templates and records: findings to act on, in bounded time and memory, and never a crash."""

import csv
import json
import os
from io import BytesIO, StringIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_job.api.base import claim_path
from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.failures import Outcome
from finetune_job.plan.run_plan import DataPlan, DatasetPlan
from finetune_trainer.data import render_limit
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.tokenizer import load_checked_tokenizer
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.processes import sandbox
from finetune_trainer.roles.preflight import run
from tests.hostile.mutations import WHOLE_FILES, spoilt_bytes, spoilt_values
from tests.hostile.test_model_files import assert_sensible, cases, special
from tests.unit.finetune_trainer.data.chat_templates import QWEN25
from tests.unit.finetune_trainer.data.tokenizers_by_hand import byte_tokenizer
from tests.unit.finetune_trainer.preflight.conftest import PAIRS

CHAT = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 16


@pytest.fixture(autouse=True)
def tight(monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 5)
    monkeypatch.setattr(sandbox, "DATA_BYTES", 1 << 29)
    monkeypatch.setattr(render_limit, "RENDER_SECONDS", 1.0)


BESIDE = {
    "special_tokens_map.json": {
        "eos_token": "<|endoftext|>",
        "pad_token": {"content": "<|endoftext|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    },
    "added_tokens.json": {"<|im_start|>": 1024, "<|im_end|>": 1025},
}
"""Files that older tokenizers have next to tokenizer.json, and that are read where they are."""


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", *BESIDE])
@cases(30)
def test_spoilt_tokenizer_files_end_in_findings(context, model, name, seeds):
    path, plan = model / name, context().plan
    content = path.read_bytes() if path.exists() else json.dumps(BESIDE[name]).encode()
    for seed in seeds:
        spoilt = spoilt_values(json.loads(content), seed) if seed % 2 else spoilt_bytes(content, seed)
        path.write_bytes(spoilt)
        tokenizer, findings = load_checked_tokenizer(plan, model)
        assert tokenizer is not None or any(finding.severity == "error" for finding in findings)
        assert_sensible(findings)


@pytest.mark.parametrize("place", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
@cases(20)
def test_spoilt_template_files_end_in_findings(context, model, place, seeds):
    plan = context({"data.format": "Chat", "data.validation": None}).plan
    (model / "chat_template.jinja").write_text(QWEN25.template)
    path = model / place
    path.parent.mkdir(exist_ok=True)
    for seed in seeds:
        path.write_bytes(spoilt_bytes(QWEN25.template.encode(), seed))
        _, findings = load_checked_tokenizer(plan, model)
        assert_sensible(findings)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**11 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages %}{{ m.content }}{% endfor",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "",
        "\x00",
    ],
)
def test_a_hostile_template_ends_in_a_finding(context, claims, template):
    (claims / "data" / "train.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in CHAT))
    job = context({"data.format": "Chat", "data.chatTemplate": template or " ", "data.validation": None})
    tokenizer, findings = load_checked_tokenizer(job.plan, job.base_model)
    assert tokenizer is None
    assert {finding.field for finding in findings} == {"spec.data.chatTemplate"}
    assert_sensible(findings)


@pytest.fixture
def prepared(tmp_path):
    """`prepared("train.csv")`: the findings about a file or directory of prompts and completions under tmp_path/data."""
    (tmp_path / "data").mkdir()
    tokenizer = byte_tokenizer(["</s>"], eos_token="</s>")

    def made(name):
        named = DatasetPlan(location=claim_path(f"pvc://data/{name}"), source="", field="spec.data.source", weight=1.0)
        settings = {"chat_template": None, "max_sequence_length": 64, "packing": True, "loss_on": LossOn.COMPLETION}
        plan = DataPlan(train=(named,), validation=None, format=DataFormat.PROMPT_COMPLETION, **settings)
        with prepare(plan, tmp_path, tmp_path, tokenizer, tmp_path / "prepared", num_workers=0) as preparation:
            assert_sensible(preparation.findings)
            assert bool(preparation.splits) is not any(finding.severity == "error" for finding in preparation.findings)
            return preparation.findings

    return made


@pytest.mark.parametrize("content", WHOLE_FILES, ids=lambda content: repr(content[:12]))
@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet"])
def test_data_that_is_something_else_ends_in_findings(tmp_path, prepared, extension, content):
    (tmp_path / "data" / f"train.{extension}").write_bytes(content)
    assert "error" in {finding.severity for finding in prepared(f"train.{extension}")}


def test_preflight_refuses_for_such_data(context, claims):
    (claims / "data" / "train.jsonl").write_bytes(b"\0" * 64)
    result = run(context())
    assert result.outcome is Outcome.REFUSED
    assert any(finding.field.startswith("spec.data.") for finding in result.findings)


def table(records, extension):
    """The same records in a file of another kind."""
    if extension == "parquet":
        held = BytesIO()
        pq.write_table(pa.Table.from_pylist(records), held)
        return held.getvalue()
    if extension == "csv":
        rows = StringIO()
        writer = csv.DictWriter(rows, ("prompt", "completion"))
        writer.writeheader()
        writer.writerows(records)
        return rows.getvalue().encode()
    return json.dumps(records).encode() if extension == "json" else "\n".join(map(json.dumps, records)).encode()


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet"])
@cases(80)
def test_spoilt_records_end_in_findings_or_are_read(tmp_path, prepared, extension, seeds):
    path = tmp_path / "data" / f"train.{extension}"
    content = table(PAIRS, extension)
    severities = set()
    for seed in seeds:
        path.write_bytes(spoilt_bytes(content, seed))
        severities.update(finding.severity for finding in prepared(path.name))
    assert "error" in severities


@pytest.mark.parametrize("kind", ["pipe", "socket", "loop", "device", "directory"])
@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet"])
def test_data_that_is_no_file_is_named_and_never_waited_for(tmp_path, prepared, extension, kind):
    path = tmp_path / "data" / f"train.{extension}"
    special(path, kind)
    (finding,) = prepared(path.name)
    assert path.name in finding.message or path.name in finding.value


def test_a_pipe_among_the_files_of_a_directory_is_named(tmp_path, prepared):
    directory = tmp_path / "data" / "many"
    directory.mkdir()
    (directory / "a.csv").write_bytes(table(PAIRS, "csv"))
    os.mkfifo(directory / "b.jsonl")
    (finding,) = prepared("many")
    assert finding.rule == "data-file-unreadable"
    assert "many/b.jsonl" in finding.message


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "hole"])
@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/x.jinja", "special_tokens_map.json"])
def test_a_special_file_beside_the_tokenizer_is_named(model, name, kind):
    (model / name).parent.mkdir(exist_ok=True)
    special(model / name, kind)
    found = inspect_model_files(model, "pvc://models/tiny-llama").findings
    assert {(finding.rule, finding.value) for finding in found} == {("model-file-unusable", name)}

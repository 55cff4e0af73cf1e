"""Hostile tokenizer files, chat templates and records: findings to act on, in bounded time and memory, and never a crash."""

import json

import pytest

from finetune_job.failures import Outcome
from finetune_trainer.preflight import confined as confinement
from finetune_trainer.preflight.run import run
from finetune_trainer.preflight.tokenizer import checked_tokenizer
from tests.hostile.mutations import WHOLE_FILES, spoilt_bytes, spoilt_values
from tests.hostile.test_model_files import assert_sensible, cases

CHAT = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 16


@pytest.fixture(autouse=True)
def tight(monkeypatch):
    monkeypatch.setattr(confinement, "CPU_SECONDS", 5)
    monkeypatch.setattr(confinement, "DATA_BYTES", 1 << 29)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@cases(60)
def test_spoilt_tokenizer_files_end_in_findings(context, model, name, seeds):
    path, plan = model / name, context().plan
    content = path.read_bytes()
    for seed in seeds:
        spoilt = spoilt_values(json.loads(content), seed) if seed % 2 else spoilt_bytes(content, seed)
        path.write_bytes(spoilt)
        tokenizer, findings = checked_tokenizer(plan, model)
        assert tokenizer is not None or any(finding.severity == "error" for finding in findings)
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
    tokenizer, findings = checked_tokenizer(job.plan, job.base_model)
    assert tokenizer is None
    assert {finding.field for finding in findings} == {"spec.data.chatTemplate"}
    assert_sensible(findings)


@pytest.mark.parametrize("content", WHOLE_FILES, ids=lambda content: repr(content[:12]))
@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet"])
def test_data_that_is_something_else_ends_in_findings(context, claims, extension, content):
    (claims / "data" / f"train.{extension}").write_bytes(content)
    result = run(context({"data.source": f"pvc://data/train.{extension}"}))
    assert result.outcome is Outcome.REFUSED
    assert_sensible(result.findings)
    assert any(finding.field.startswith("spec.data.") for finding in result.findings)


@cases(25)
def test_spoilt_records_end_in_findings_or_are_read(context, claims, seeds):
    path = claims / "data" / "train.jsonl"
    content = path.read_bytes()
    for seed in seeds:
        path.write_bytes(spoilt_bytes(content, seed))
        assert_sensible(run(context()).findings)

"""A chat template that comes to no end is a finding that names the template and the record, and nothing waits for it."""

import json
import sys

import pytest

from finetune_job.api.inputs import DataFormat, LossOn
from finetune_trainer.data import file_parts as parts
from finetune_trainer.data import prepare, render_limit, worker, workers
from finetune_trainer.data.records import Record
from finetune_trainer.data.tokenize import EndlessTemplateError, tokenize
from tests.unit.finetune_trainer.data.chat_templates import CHATML
from tests.unit.finetune_trainer.data.test_prepare import data_set, plan

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Two lists that are equal and share nothing are compared in C, where no exception gets in: 3000 ** 3 comparisons.
COMPARES = (
    "{% set a = [0] * 3000 %}{% set b = [a] * 3000 %}{% set c = [b] * 3000 %}"
    "{% set x = [0] * 3000 %}{% set y = [x] * 3000 %}{% set z = [y] * 3000 %}{{ '' if c == z else '' }}"
)
HUGE = "{{ messages[0]['content'] * 2 * 10 ** 7 }}"


def template(what):
    """ChatML, but for a question of the word `boom`."""
    return f"{{% if messages[0]['content'] == 'boom' %}}{what}{{% endif %}}{CHATML.template}"


def chats(boom_at=None, count=20, name=""):
    words = ["boom" if number == boom_at else f"{name} question {number}" for number in range(1, count + 1)]
    return [[{"role": "user", "content": word}, {"role": "assistant", "content": f"answer to {word}"}] for word in words]


SHORT_WORKER = f"""
import runpy, sys
from finetune_trainer.data import render_limit
render_limit.RENDER_SECONDS, render_limit.END_SECONDS = 0.5, 1.0
sys.argv[1:] = sys.argv[3:]
runpy.run_module("{worker.__name__}", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    monkeypatch.setattr(render_limit, "RENDER_SECONDS", 0.5)
    monkeypatch.setattr(render_limit, "END_SECONDS", 1.0)
    (tmp_path / "short.py").write_text(SHORT_WORKER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "short.py"} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(workers.sys, "executable", str(python))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """`prepared(what, boom_at)`: errors found in a file of 20 chats in which one may be too much for the template."""
    monkeypatch.setattr(parts, "PART_BYTES", 500)
    (tmp_path / "data").mkdir()
    tokenizer = CHATML.tokenizer()
    tokenizer.save_pretrained(tmp_path / "models")

    def made(what, boom_at, **more):
        for name, at in (("train", boom_at), ("held-out", more.pop("held_out_at", None))):
            lines = [json.dumps({"messages": chat}) for chat in chats(at, name=name)]
            (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(lines))
        settings = {
            "max_sequence_length": 500,
            "format": DataFormat.CHAT,
            "loss_on": LossOn.ASSISTANT,
            "chat_template": template(what),
        }
        data_plan = plan(
            train=(data_set("pvc://data/train.jsonl"),),
            validation=data_set("pvc://data/held-out.jsonl", field="spec.data.validation.source"),
            **settings,
        )
        with prepare.prepare(data_plan, tmp_path, tmp_path / "models", tokenizer, tmp_path / "prepared", **more) as preparation:
            return [finding for finding in preparation.findings if finding.severity == "error"]

    return made


@pytest.mark.parametrize("what", [LOOPS, COMPARES])
@pytest.mark.parametrize(("held_out", "num_workers"), [(False, 1), (False, 2), (True, 1)])
def test_a_record_without_end_is_named_and_the_rest_is_not_tried(prepared, what, held_out, num_workers):
    places = {"held_out_at": 13, "boom_at": 17} if held_out else {"boom_at": 13}
    (finding,) = prepared(what, **places, num_workers=num_workers)
    assert (finding.rule, finding.severity) == ("data-record-invalid", "error")
    assert ("held-out.jsonl" if held_out else "train.jsonl") in finding.message
    assert "line 13" in finding.message
    assert "the chat template takes more than" in finding.message
    assert "spec.data.chatTemplate" in finding.fix


def test_a_text_of_any_length_is_named(prepared):
    (finding,) = prepared(HUGE, 13)
    assert "line 13" in finding.message
    assert "writes 8000" in finding.message


def test_a_template_that_ends_is_used(prepared):
    assert prepared(LOOPS, None) == []


def test_an_endless_template_is_stopped_within_one_process():
    record = Record(4, "", "", tuple(chats(1, 1)[0]))
    with pytest.raises(EndlessTemplateError) as caught:
        tokenize(CHATML.tokenizer(), [record], LossOn.ALL, template(LOOPS))
    assert (caught.value.problem.line, caught.value.problem.value) == (4, "'answer to boom'")

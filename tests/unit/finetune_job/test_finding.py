"""One finding, in full for a terminal and short for status and reports."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.failures import Outcome, TerminationReport, parse_envelope
from finetune_job.finding import FieldChange, Finding
from finetune_operator.passes.execute import status_document

CHANGE = FieldChange(field="spec.training.epochs", value=None)


def finding(**given: Any) -> Finding:
    return Finding(**({"rule": "a-rule", "severity": "error", "message": "wrong", "changes": (CHANGE,)} | given))


def test_texts_are_cut_and_changes_are_left_out_of_a_short_one() -> None:
    full = finding(rule="r" * 200, field="f" * 9, value="v" * 9, message="m" * 9, fix="x" * 9, source="s" * 9)
    short = full.shortened(4)
    assert short == Finding(rule="rrrr", severity="error", field="ffff", value="vvvv", message="mmmm", fix="xxxx", source="ssss")
    assert full.message == "m" * 9


def test_an_id_has_its_own_limit() -> None:
    assert len(finding(rule="r" * 200).shortened(4096).rule) == 128


@pytest.mark.parametrize(("written", "read"), [("error", "error"), ("warning", "warning"), ("notice", "warning")])
def test_a_severity_of_another_release_refuses_nothing(written: str, read: str) -> None:
    report = {
        "role": "preflight",
        "outcome": "Refused",
        "findings": [{"rule": "x", "severity": written, "message": "m", "new": 1}],
    }
    parsed = parse_envelope(json.dumps(report))
    assert parsed is not None
    assert [one.severity for one in parsed.findings] == [read]


def test_a_severity_that_is_not_a_text_is_refused() -> None:
    with pytest.raises(ValidationError):
        finding(severity=3)


def test_an_envelope_has_no_changes() -> None:
    report = TerminationReport(role="preflight", outcome=Outcome.REFUSED, findings=[finding()])
    assert json.loads(report.envelope())["findings"] == [{"rule": "a-rule", "severity": "error", "message": "wrong"}]


def test_status_has_no_changes_not_even_none() -> None:
    status = FineTuneJobStatus(findings=[finding().shortened(4096)])
    assert status_document(status)["findings"] == [{"rule": "a-rule", "severity": "error", "message": "wrong"}]

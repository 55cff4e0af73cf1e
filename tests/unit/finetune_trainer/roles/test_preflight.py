"""The order of preflight, and the class of failure that a refusal has; what each check finds is tested with the check."""

from typing import Any

import pytest

from finetune_job.failures import FailureClass, Outcome
from finetune_trainer.rehearsal.verdicts import not_done_finding
from finetune_trainer.roles import preflight
from tests.unit.finetune_trainer.preflight.conftest import claims, context, made_claims, manifest, model

__all__ = ["claims", "context", "made_claims", "manifest", "model"]


def test_findings_of_the_inspection_come_before_those_of_the_checks() -> None:
    assert [check.__name__ for check in preflight.CHECKS] == [
        "check_fit",
        "check_rows",
        "check_use",
        "check_trained_rows",
        "check_start",
        "check_room",
        "check_memory",
        "check_finite",
    ]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("spec.data.datasets[0].source", FailureClass.USER_DATA),
        ("spec.model.source", FailureClass.USER_MODEL),
        ("spec.training.maxSteps", FailureClass.USER_CONFIG),
    ],
)
def test_a_refusal_has_the_class_of_its_first_error_and_writes_nothing(
    context: Any, monkeypatch: pytest.MonkeyPatch, field: str, expected: FailureClass
) -> None:
    job = context({})
    warning = not_done_finding("made up", job.claims_root)
    error = warning.model_copy(update={"severity": "error", "field": field, "message": "is wrong", "fix": "make it right"})
    monkeypatch.setattr(preflight, "CHECKS", (lambda _seen: [warning, error],))
    report = preflight.run(job)
    assert (report.outcome, report.failure, report.hint) == (Outcome.REFUSED, expected, "make it right")
    assert report.message == f"1 error; first: {field}: is wrong"
    assert [finding.severity for finding in report.findings] == ["error", "warning"]
    assert not job.workspace.prepared.exists()
    assert not job.workspace.model_report.exists()

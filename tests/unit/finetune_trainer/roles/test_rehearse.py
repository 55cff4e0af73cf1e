"""Preflight rehearses a job that it accepts, and says so; in a process of its own, which leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_job.failures import Outcome
from finetune_trainer.inspection.report import RehearsalReport, Verdict, read_report
from finetune_trainer.rehearsal.verdicts import not_done_finding
from finetune_trainer.roles import preflight
from finetune_trainer.roles import rehearse as process
from tests.unit.finetune_trainer.preflight.conftest import claims, context, made_claims, manifest, model

__all__ = ["claims", "context", "made_claims", "manifest", "model"]


def test_an_accepted_job_is_rehearsed_and_nothing_is_left(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS", 240.0)
    monkeypatch.setattr(preflight, "rehearse_in_own_process", process.rehearse_in_own_process)
    job = context({"preflight.rehearsal": "Run"})
    result = preflight.run(job)
    assert result.outcome is Outcome.SUCCEEDED, result
    report = read_report(job.workspace.model_report)
    assert report is not None
    assert report.rehearsal.verdict in (Verdict.PASSED, Verdict.NOT_DONE), report.rehearsal
    assert result.facts["rehearsal"] == report.rehearsal.verdict
    assert report.rehearsal.stages, "no stage was tried"
    assert not list(job.workspace.root.glob("rehearsal*"))


def test_a_skipped_rehearsal_is_recorded(context: Any) -> None:
    job = context({"preflight.rehearsal": "Skip"})
    assert preflight.run(job).facts["rehearsal"] == "Skipped"
    report = read_report(job.workspace.model_report)
    assert report is not None
    assert report.rehearsal.verdict is Verdict.SKIPPED


@pytest.mark.parametrize("severity", ["error", "warning"])
def test_what_the_rehearsal_finds_decides(context: Any, monkeypatch: pytest.MonkeyPatch, severity: str) -> None:
    job = context({"preflight.rehearsal": "Run"})
    finding = not_done_finding("made up", job.claims_root).model_copy(update={"severity": severity})
    found = RehearsalReport(verdict=Verdict.FAILED, findings=(finding,))
    monkeypatch.setattr(preflight, "rehearse_in_own_process", lambda _context: found)
    result = preflight.run(job)
    assert result.outcome is (Outcome.REFUSED if severity == "error" else Outcome.SUCCEEDED)
    assert [each.rule for each in result.findings] == ["rehearsal-not-done"]
    assert job.workspace.prepared.exists() == (severity == "warning")

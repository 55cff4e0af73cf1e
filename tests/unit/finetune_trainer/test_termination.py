"""How a role ends: its report, its envelope and its exit code."""

import json
from pathlib import Path

from finetune_job.failures import EXIT_CODES, TERMINATION_LIMIT_BYTES, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_trainer.errors import DataError, PreemptedError, TrainerError
from finetune_trainer.termination import failure_report, run_role
from tests.support.tiny_model import run_context, tiny_spec


def test_a_failing_role_leaves_an_envelope_that_fits(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"

    def body() -> TerminationReport:
        raise DataError("x" * 20_000, hint="shorten it")

    assert run_role("train", 2, body, log, lambda: None) == EXIT_CODES[FailureClass.USER_DATA]
    assert log.stat().st_size <= TERMINATION_LIMIT_BYTES
    report = parse_envelope(log.read_text())
    assert report is not None
    assert (report.role, report.attempt, report.failure, report.outcome) == ("train", 2, FailureClass.USER_DATA, Outcome.FAILED)


def test_a_report_of_preemption_names_the_step() -> None:
    report = failure_report(PreemptedError("stopped", step=7), "train", 0, rank=1)
    assert (report.step, report.rank, report.failure) == (7, 1, FailureClass.PREEMPTED)
    assert TrainerError("x").step is None


def succeeded() -> TerminationReport:
    return TerminationReport(role="fetch", attempt=1, outcome=Outcome.SUCCEEDED, time=0.0)


def test_a_report_is_kept_whole_on_the_workspace(tmp_path: Path) -> None:
    context, log = run_context(tmp_path, tiny_spec()), tmp_path / "termination-log"
    assert run_role("fetch", context.attempt, succeeded, log, lambda: context, node_rank=3) == 0
    kept = context.workspace.reports("fetch", context.attempt) / "node-3.json"
    assert json.loads(kept.read_text())["outcome"] == "Succeeded"
    envelope = parse_envelope(log.read_text())
    assert envelope is not None
    assert context.claims_root / context.plan.workspace.claim / envelope.report_path == kept


def test_a_full_claim_does_not_hide_the_reason(tmp_path: Path) -> None:
    context, log = run_context(tmp_path, tiny_spec()), tmp_path / "termination-log"
    reports = context.workspace.reports("fetch", context.attempt)
    reports.parent.mkdir(parents=True, exist_ok=True)
    reports.write_text("a file where the directory should be")

    def body() -> TerminationReport:
        raise DataError("no records")

    assert run_role("fetch", context.attempt, body, log, lambda: context) == EXIT_CODES[FailureClass.USER_DATA]
    envelope = parse_envelope(log.read_text())
    assert envelope is not None
    assert (envelope.message, envelope.report_path) == ("no records", "")

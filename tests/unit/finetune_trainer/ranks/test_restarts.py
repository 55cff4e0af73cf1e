"""When the supervisor of a single pod starts its ranks again, and the record of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune_job.failures import FailureClass, Outcome, RankRestart, TerminationReport
from finetune_trainer.ranks.restarts import read_restarts, restart_after, set_traces_aside, write_restarts
from tests.support.cases import table
from tests.support.tiny_model import run_context, tiny_spec


def a_report(failure: FailureClass | None, step: int | None = 7, message: str = "rank 1 failed") -> TerminationReport:
    outcome = Outcome.SUCCEEDED if failure is None else Outcome.FAILED
    return TerminationReport(role="train", outcome=outcome, failure=failure, message=message, rank=1, step=step, time=9.0)


@pytest.mark.parametrize(("failure", "step", "is_restarted"), table(__file__, "FAILURES"))
def test_only_failures_of_processes_are_restarted_in_the_pod(failure: str | None, step: int | None, is_restarted: bool) -> None:
    report = a_report(None if failure is None else FailureClass(failure), step)
    restart = restart_after(report, num_restarts=0, most=2, now=11.0)
    assert (restart is not None) == is_restarted


def test_a_pod_has_no_more_restarts_than_it_may() -> None:
    report = a_report(FailureClass.INTERNAL)
    assert [restart_after(report, num_restarts=number, most=2, now=11.0) is not None for number in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert restart_after(report, num_restarts=0, most=0, now=11.0) is None


def test_a_restart_says_what_failed() -> None:
    restart = restart_after(a_report(FailureClass.INTERNAL), num_restarts=0, most=1, now=11.0)
    assert restart == RankRestart(failure=FailureClass.INTERNAL, message="rank 1 failed", rank=1, step=7, time=11.0)
    silent = a_report(FailureClass.INTERNAL, message="").model_copy(update={"exception": "Traceback\nKeyError: 'x'\n"})
    assert getattr(restart_after(silent, num_restarts=0, most=1, now=11.0), "message", None) == "KeyError: 'x'"


def test_the_record_is_read_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "restarts" / "train-0.json"
    assert read_restarts(path) == []
    restarts = [RankRestart(failure=FailureClass.STALLED, message="stopped", step=3, time=1.5)]
    write_restarts(path, restarts)
    assert read_restarts(path) == restarts
    path.write_text("[{")
    assert read_restarts(path) == []


def test_what_the_failed_ranks_left_is_kept_and_is_not_taken_for_that_of_the_next(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    for directory in (context.workspace.reports("train", 0), context.workspace.stacks(0)):
        directory.mkdir(parents=True)
        (directory / "stalled.json").write_text("{}")
    set_traces_aside(context, 1)
    assert not context.workspace.stacks(0).exists()
    assert (context.workspace.reports("train", 0).with_name("train-0-before-restart-1") / "stalled.json").is_file()
    set_traces_aside(context, 2)


def test_what_an_interrupted_restart_has_set_aside_holds_up_no_other(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    kept = context.workspace.stacks(0).with_name("train-0-before-restart-1")
    for content in ("first", "second"):
        context.workspace.stacks(0).mkdir(parents=True)
        (context.workspace.stacks(0) / "stalled.json").write_text(content)
        set_traces_aside(context, 1)
        assert (kept / "stalled.json").read_text() == content


def test_a_record_that_somebody_has_made_long_is_read_as_far_as_an_attempt_can_have_restarts(tmp_path: Path) -> None:
    write_restarts(tmp_path / "train-0.json", [RankRestart(failure=FailureClass.INTERNAL)] * 5000)
    assert len(read_restarts(tmp_path / "train-0.json")) == 2

"""Attempts of a run, from the records that they left behind."""

import json
from pathlib import Path

from finetune_job.failures import FailureClass, Outcome, RankRestart, TerminationReport
from finetune_job.layout import WorkspaceLayout
from finetune_trainer.observe.goodput import Activity, AttemptStarted, TimeSpent
from finetune_trainer.ranks.reports import write_rank_report
from finetune_trainer.report.timeline import attempts_of, read_timeline

RECORDS = [
    AttemptStarted(attempt=0, time=100.0, step=0),
    TimeSpent(attempt=0, time=130.0, step=8, seconds={Activity.STEPS: 20.0, Activity.STARTUP: 10.0}),
    AttemptStarted(attempt=1, time=150.0, step=5),
    TimeSpent(attempt=1, time=160.0, step=7, seconds={Activity.STEPS: 10.0}),
    AttemptStarted(attempt=2, time=170.0, step=7),
    TimeSpent(attempt=2, time=200.0, step=10, seconds={Activity.STEPS: 30.0}),
]
KILLED = TerminationReport(
    role="train", attempt=0, outcome=Outcome.FAILED, failure=FailureClass.INTERNAL, message="rank 1 was killed", time=131.0
)


def test_attempts_follow_each_other_with_what_was_lost_and_why() -> None:
    assert [tuple(attempt.model_dump().values()) for attempt in attempts_of(RECORDS, {0: [KILLED], 1: []}, {})] == [
        (0, 100.0, 30.0, 0, 8, 3, "Internal", "rank 1 was killed"),
        (1, 150.0, 10.0, 5, 7, 0, "ended without a report", ""),
        (2, 170.0, 30.0, 7, 10, 0, "finished", ""),
    ]


def test_a_restart_in_the_pod_ends_the_start_that_it_follows_and_no_other_of_its_attempt() -> None:
    starts = [AttemptStarted(attempt=0, time=time, step=0) for time in (100.0, 150.0, 190.0)]
    restart = RankRestart(failure=FailureClass.STALLED, message="rank 0 stopped", time=188.0)
    attempts = attempts_of(starts, {}, {0: [restart]})
    assert [(attempt.ending, attempt.message) for attempt in attempts] == [
        ("ended without a report", ""),
        ("Stalled", "rank 0 stopped"),
        ("finished", ""),
    ]


def test_records_without_a_start_and_clocks_that_go_back_do_no_harm() -> None:
    assert attempts_of(RECORDS[1:2], {}, {}) == []
    back = [AttemptStarted(attempt=0, time=100.0, step=0), TimeSpent(attempt=0, time=40.0, step=2, seconds={})]
    assert attempts_of(back, {}, {})[0].seconds == 0.0


def test_it_is_read_from_the_workspace(tmp_path: Path) -> None:
    workspace = WorkspaceLayout(tmp_path)
    assert read_timeline(workspace, None).attempts == ()
    assert read_timeline(workspace, None).goodput.goodput is None
    lines = [json.dumps(record.model_dump(mode="json")) for record in RECORDS]
    workspace.accounts.write_text("\n".join([*lines[:2], "no JSON", '{"kind": "spent"}', *lines[2:]]) + "\n")
    write_rank_report(workspace.reports("train", 0), KILLED)
    found = read_timeline(workspace, None)
    assert [attempt.ending for attempt in found.attempts] == ["Internal", "ended without a report", "finished"]
    assert found.lost_steps == 3
    # 100 s in all: 20 s of steps, of which 3 of 8 were lost, 10 s and 30 s more.
    assert found.goodput.productive_seconds == 52.5

"""From when the deadlines count, in times that are written by hand."""

import pytest

from finetune_job.api.job import RunSpec
from finetune_job.api.status import FineTuneJobStatus
from finetune_job.names import Role
from finetune_operator.decide.seen.children_seen import BatchJobView, PodView
from finetune_operator.decide.seen.times import active_deadline, stall_deadline, startup_deadline
from tests.support.builders import after


def run(**deadlines: int) -> RunSpec:
    return RunSpec.model_validate(deadlines)


def batch_job(*, start: float | None = None) -> BatchJobView:
    """Created at 0."""
    started = None if start is None else after(start)
    return BatchJobView("tune-train-0", "job", Role.TRAIN, 0, created=after(0), start_time=started)


def pod(rank: int, *, created: float = 0, scheduled: float | None = None, started: float | None = None) -> PodView:
    return PodView(
        name=f"tune-train-0-{rank}",
        uid=f"pod-{rank}",
        role=Role.TRAIN,
        attempt=0,
        created=after(created),
        node_rank=rank,
        scheduled=None if scheduled is None else after(scheduled),
        started=None if started is None else after(started),
    )


def advanced(seconds: float) -> FineTuneJobStatus:
    time = after(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")
    return FineTuneJobStatus.model_validate({"progress": {"step": 7, "advancedTime": time}})


@pytest.mark.parametrize(
    ("job", "pods", "due"),
    [
        # A queue that lets the Job go on after an hour sets its start back: nobody has waited for a pod before.
        (batch_job(start=3600), (), 3900),
        # It has been let go and the Job controller has not started it yet: however long it waited in the queue counts for
        # nothing.
        (batch_job(), (), None),
        # The Job controller makes pods before it writes when it began.
        (batch_job(), (pod(0, created=20, scheduled=30),), 330),
        # Pods of a life before the queue held the Job back are no reason to wait less.
        (batch_job(start=3600), (pod(0, scheduled=10),), 3900),
        # The last pod that got a node counts, and where none has one yet, when the last was created.
        (batch_job(start=5), (pod(0, created=6, scheduled=10), pod(1, created=6, scheduled=900)), 1200),
        (batch_job(start=5), (pod(0, created=20), pod(1, created=40)), 340),
    ],
)
def test_a_start_has_its_time_from_when_nothing_but_the_start_is_waited_for(
    job: BatchJobView, pods: tuple[PodView, ...], due: float | None
) -> None:
    expected = None if due is None else after(due)
    assert startup_deadline(run(startupDeadlineSeconds=300), job, pods) == expected


@pytest.mark.parametrize(
    ("pods", "status", "due"),
    [
        # The rank that runs already waits for the other: there can be no step yet.
        ((), FineTuneJobStatus(), None),
        ((pod(0, started=10), pod(1)), FineTuneJobStatus(), None),
        ((pod(0, started=10),), advanced(5), None),
        ((pod(0, started=10), pod(1, started=400)), FineTuneJobStatus(), 1000),
        ((pod(0, started=400), pod(1, started=10)), advanced(700), 1300),
        ((pod(0, started=10), pod(1, started=400)), advanced(5), 1000),
    ],
)
def test_a_step_is_awaited_only_while_all_pods_run(
    pods: tuple[PodView, ...], status: FineTuneJobStatus, due: float | None
) -> None:
    expected = None if due is None else after(due)
    assert stall_deadline(run(stallDeadlineSeconds=600), status, pods, nodes=2) == expected


def test_without_a_limit_no_step_is_awaited() -> None:
    assert stall_deadline(run(), advanced(0), (pod(0, started=10),), nodes=1) is None


def test_the_job_has_its_time_from_its_start_without_the_time_under_suspension() -> None:
    started = {"startTime": "2026-01-01T12:00:00Z", "suspendedSeconds": 50}
    assert active_deadline(run(activeDeadlineSeconds=1000), FineTuneJobStatus.model_validate(started)) == after(1050)
    assert active_deadline(run(activeDeadlineSeconds=1000), FineTuneJobStatus()) is None
    assert active_deadline(run(), FineTuneJobStatus.model_validate(started)) is None

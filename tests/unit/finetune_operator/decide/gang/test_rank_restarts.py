"""Restarts of ranks inside their pod: how often a Job may have some, and how they enter status and counters."""

from __future__ import annotations

import pytest

from finetune_job.api.status import Restarts
from finetune_job.failures import FailureClass, RankRestart
from finetune_job.names import Role
from finetune_job.progress import Progress
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, ObservedBuilder, a_job, envelope, observing
from tests.unit.finetune_operator.decide.reading import created, written

KILLED = RankRestart(failure=FailureClass.INTERNAL, message="rank 1 was killed by signal 9", rank=1, step=7, time=1_000_000.0)
STALLED = KILLED.model_copy(update={"failure": FailureClass.STALLED, "message": "rank 0 stopped"})


def trained_on(*restarts: RankRestart, attempt: int = 0) -> ObservedBuilder:
    """A gang of one pod whose rank 0 tells these restarts."""
    progress = Progress(attempt=attempt, step=9, total_steps=20, restarts=list(restarts))
    return observing(a_job()).training().but(progress=progress)


def test_a_restart_is_recorded_counted_and_reported_once() -> None:
    actions = reconcile(trained_on(KILLED).build(), T0)
    status = written(actions)
    (attempt,) = status.attempts
    assert [(one.failure, one.message, one.rank, one.step, one.time) for one in attempt.restarts] == [
        ("Internal", "rank 1 was killed by signal 9", 1, 7, "1970-01-12T13:46:40Z")
    ]
    assert (attempt.outcome, status.attempt, status.restarts.counted) == ("Running", 0, 1)
    text = "Attempt 0 of train continues in its pod after a failure: Internal: rank 1 was killed by signal 9"
    assert [event.message for event in actions.events] == [text]
    again = reconcile(trained_on(KILLED).with_status(**dict(status)).build(), T0)
    assert again.events == ()
    assert again.status is None or again.status.restarts.counted == 1
    second = written(reconcile(trained_on(KILLED, STALLED).with_status(**dict(status)).build(), T0))
    assert [one.failure for one in second.attempts[0].restarts] == ["Internal", "Stalled"]
    assert second.restarts.counted == 2


@pytest.mark.parametrize(
    "restarts",
    [[KILLED.model_copy(update={"failure": FailureClass.USER_DATA})], [KILLED.model_copy(update={"failure": "DeviceFault"})]],
)
def test_a_claim_that_no_supervisor_makes_is_not_believed(restarts: list[RankRestart]) -> None:
    status = written(reconcile(trained_on(*restarts).build(), T0))
    assert (status.attempts[0].restarts, status.restarts.counted) == ([], 0)


def test_a_container_cannot_claim_more_restarts_than_a_pod_has() -> None:
    status = written(reconcile(trained_on(*[KILLED] * 50).build(), T0))
    assert (len(status.attempts[0].restarts), status.restarts.counted) == (2, 2)


def test_progress_of_another_attempt_says_nothing() -> None:
    actions = reconcile(trained_on(KILLED, attempt=3).build(), T0)
    assert actions.status is None or actions.status.restarts.counted == 0


def test_the_report_of_the_pod_has_restarts_that_no_progress_reported() -> None:
    failed = envelope(FailureClass.INTERNAL, rank=0, step=12, restarts=[KILLED, KILLED])
    pod = {"exit_code": 52, "termination_message": failed}
    status = written(reconcile(observing(a_job()).training().pod(**pod).batch_job_failed().build(), T0))
    (attempt,) = status.attempts
    assert (attempt.outcome, attempt.failure, len(attempt.restarts)) == ("Failed", "Internal", 2)
    assert (status.attempt, status.restarts.counted) == (1, 3)
    done = envelope(restarts=[KILLED])
    seen = observing(a_job()).training().pod(exit_code=0, termination_message=done).batch_job("Complete")
    status = written(reconcile(seen.build(), T0))
    assert (status.attempts[0].outcome, status.restarts.counted) == ("Succeeded", 1)


def test_restarts_in_the_pod_use_up_what_the_job_may_have() -> None:
    failed = envelope(FailureClass.INTERNAL, rank=0, step=12, restarts=[KILLED, KILLED])
    seen = observing(a_job().spec("run.maxRestarts", 2)).training().pod(exit_code=52, termination_message=failed)
    status = written(reconcile(seen.batch_job_failed().build(), T0))
    assert (status.phase, status.restarts.counted, status.attempt) == ("Stopping", 2, 0)


@pytest.mark.parametrize(("maximum", "counted", "told"), [(3, 0, "2"), (3, 2, "1"), (3, 3, None), (0, 0, None), (1, 0, "1")])
def test_a_job_allows_as_many_restarts_as_are_left(maximum: int, counted: int, told: str | None) -> None:
    seen = observing(a_job().spec("run.maxRestarts", maximum)).prepared().but(service_exists=True).nothing_left()
    actions = reconcile(seen.with_status(restarts=Restarts(counted=counted)).build(), T0)
    (job,) = [one.body for one in actions.creates if one.kind == "Job"]
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert (arguments[arguments.index("--restarts") + 1] if "--restarts" in arguments else None) == told
    assert created(actions) == ["Job/tune-train-0"]


def test_a_stall_before_the_ranks_have_met_is_not_counted() -> None:
    for step, counted in ((None, 0), (0, 1), (7, 1)):
        failed = envelope(FailureClass.STALLED, rank=0, step=step)
        seen = observing(a_job()).training().pod(exit_code=53, termination_message=failed).batch_job_failed()
        status = written(reconcile(seen.build(), T0))
        assert (status.attempt, status.restarts.counted, status.restarts.uncounted) == (1, counted, 1 - counted)
        assert (status.attempts[0].failure, status.attempts[0].role) == ("Stalled", Role.TRAIN)

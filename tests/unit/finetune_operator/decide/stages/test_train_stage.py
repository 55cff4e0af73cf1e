"""Training and the restart of the gang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune_job.api.status import Attempt, Restarts
from finetune_job.failures import FailureClass
from finetune_job.progress import Progress
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.times import timestamp
from tests.support.builders import T0, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written


def test_a_running_gang_is_ready_and_its_attempt_recorded() -> None:
    seen = observing(a_job().nodes(2)).prepared().but(service_exists=True).batch_job().running()
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.READY) == ("True", Reason.RUNNING)
    assert [(one.number, one.outcome) for one in written(actions).attempts] == [(0, "Running")]
    assert created(actions) == []


def test_an_attempt_tells_when_the_last_of_its_pods_had_a_node_and_ran() -> None:
    seen = observing(a_job().nodes(2)).prepared().but(service_exists=True).batch_job().running()
    seen = seen.pod(0, scheduled=after(-299), prepared=after(-255), started=after(-240))
    seen = seen.pod(1, scheduled=after(-270), prepared=after(-265), started=after(-250))
    (attempt,) = written(reconcile(seen.build(), T0)).attempts
    assert (attempt.start_time, attempt.scheduled_time, attempt.prepared_time, attempt.running_time) == (
        "2026-01-01T11:55:00Z",
        "2026-01-01T11:55:30Z",
        "2026-01-01T11:55:45Z",
        "2026-01-01T11:56:00Z",
    )


def test_a_gang_is_not_ready_before_every_pod_runs_and_says_what_it_waits_for() -> None:
    seen = observing(a_job().nodes(2)).training().pod(1, phase="Pending", started=None, waiting_reason="ImagePullBackOff")
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.READY) == ("False", Reason.IMAGE_PULL_FAILED)
    assert "tune-train-0-1 on node node-a: ImagePullBackOff" in message(actions, ConditionType.READY)
    assert [(event.type, event.reason) for event in actions.events] == [("Warning", Reason.IMAGE_PULL_FAILED)]


def test_a_deleted_service_is_made_again() -> None:
    assert created(reconcile(observing(a_job()).training().but(service_exists=False).build(), T0)) == ["Service/tune-gang"]


def test_a_restart_writes_number_and_evidence_and_deletes_the_old_job_but_creates_nothing() -> None:
    seen = (
        observing(a_job().nodes(2))
        .training()
        .failed_pod(1, FailureClass.INTERNAL, message="boom", rank=1, step=7)
        .batch_job_failed()
    )
    actions = reconcile(seen.build(), T0)
    status = written(actions)
    assert status.attempt == 1
    assert status.restarts.counted == 1
    (record,) = status.attempts
    assert (record.number, record.outcome, record.failure, record.counted) == (0, "Failed", FailureClass.INTERNAL, True)
    assert [(one.pod, one.rank, one.step, one.exit_code) for one in record.evidence] == [("tune-train-0-1", 1, 7, 52)]
    assert "boom" in record.message
    assert deleted(actions) == ["Job/tune-train-0"]
    assert actions.deletes[0].uid == "uid-train-0"
    assert created(actions) == []
    assert (status.phase, condition(actions, ConditionType.TRAINED)) == ("Restarting", ("Unknown", Reason.RESTARTING))
    assert condition(actions, ConditionType.READY) == ("False", Reason.RESTARTING)
    assert message(actions, ConditionType.READY).startswith("Internal: rank 1, step 7, pod tune-train-0-1: boom")


RESTARTED = observing(a_job()).prepared().attempt(1).restarts(counted=1)


def test_the_next_attempt_starts_once_nothing_is_left_of_the_old_one() -> None:
    assert created(reconcile(RESTARTED.nothing_left().build(), T0)) == ["Service/tune-gang", "Job/tune-train-1"]


def test_an_old_job_that_outlived_its_number_is_deleted_whoever_forgot_it() -> None:
    seen = observing(a_job()).training().attempt(1)
    actions = reconcile(seen.build(), T0)
    assert deleted(actions) == ["Job/tune-train-0"]
    assert created(actions) == []


def test_later_restarts_wait_longer() -> None:
    failed = Attempt(number=2, outcome="Failed", end_time=timestamp(T0), failure=FailureClass.INTERNAL)
    seen = observing(a_job()).prepared().attempt(3).with_status(attempts=[failed]).nothing_left()
    seen = seen.with_status(restarts=Restarts(counted=1, uncounted=2, in_a_row=3))
    actions = reconcile(seen.build(), after(1))
    assert created(actions) == []
    assert 15 <= actions.requeue_after_seconds <= 19
    assert "Job/tune-train-3" in created(reconcile(seen.build(), after(20)))


@pytest.mark.parametrize(
    ("in_a_row", "ahead", "longest"),
    [
        # The first restart of a gang has no pause, whatever the clock of the leader before said.
        (1, 1200, 0),
        (1, 1, 0),
        # The third has one of 16 to 20 s: kept if the clocks differ by less, and never more than twice as long.
        (3, 10, 30),
        (3, 1200, 0),
    ],
)
def test_a_leader_whose_clock_is_behind_waits_for_no_time_that_its_predecessor_has_not_seen(
    in_a_row: int, ahead: int, longest: int
) -> None:
    failed = Attempt(number=2, outcome="Failed", end_time=timestamp(after(ahead)), failure=FailureClass.INTERNAL)
    seen = observing(a_job()).prepared().attempt(3).with_status(attempts=[failed]).nothing_left()
    actions = reconcile(seen.with_status(restarts=Restarts(counted=in_a_row, in_a_row=in_a_row)).build(), T0)
    if longest == 0:
        assert "Job/tune-train-3" in created(actions)
    else:
        assert created(actions) == []
        assert 0 < actions.requeue_after_seconds <= longest


@pytest.mark.parametrize(
    "failure",
    [
        FailureClass.NON_FINITE,
        FailureClass.DEVICE_OUT_OF_MEMORY,
        FailureClass.HOST_OUT_OF_MEMORY,
        FailureClass.USER_CONFIG,
        FailureClass.USER_DATA,
        FailureClass.USER_MODEL,
    ],
)
def test_what_would_fail_again_ends_the_job_with_evidence_and_advice(failure: FailureClass) -> None:
    seen = observing(a_job()).training().failed_pod(0, failure).batch_job_failed().nothing_left()
    actions = reconcile(seen.build(), T0)
    status = written(actions)
    assert (status.phase, status.attempt) == ("Failed", 0)
    assert condition(actions, ConditionType.TRAINED) == ("False", Reason.FAILED)
    assert status.attempts[0].failure is failure
    assert status.attempts[0].hint
    assert status.completion_time
    assert deleted(actions) == [], "a failed Job stays for inspection"


def test_a_status_full_of_long_attempts_stays_small() -> None:
    job = a_job().nodes(24).run(maxRestarts=100)
    status = observing(job).prepared().status
    for number in range(70):
        seen = replace(observing(job).training(attempt=number), status=status.model_copy(update={"attempt": number}))
        for node_rank in range(24):
            seen = seen.failed_pod(node_rank, FailureClass.INTERNAL, message="x" * 3000, hint="y" * 3000)
        status = written(reconcile(seen.batch_job_failed().build(), T0))
        assert status.attempt == number + 1
    assert [one.number for one in status.attempts] == list(range(6, 70))
    assert (len(status.attempts[-1].evidence), len(status.attempts[-2].evidence)) == (16, 1)
    assert len(status.model_dump_json()) < 200_000


def test_the_infrastructure_is_not_counted_but_limited() -> None:
    evicted = observing(a_job().run(maxRestarts=0)).training()
    lost = evicted.pod(0, disruption="DeletionByTaintManager", gone=True).batch_job_failed("PodFailurePolicy")
    assert written(reconcile(lost.build(), T0)).restarts.uncounted == 1
    many = reconcile(lost.restarts(uncounted=10_000).build(), T0)
    assert written(many).restarts.uncounted == 10_001, "a spot node that is taken daily, with progress in between"
    limit = reconcile(lost.with_status(restarts=Restarts(uncounted=50, in_a_row=50)).build(), T0)
    assert condition(limit, ConditionType.STALLED) == ("True", Reason.TRAIN_STOPPED)
    assert condition(limit, ConditionType.FINISHED)[0] != "True"


def test_an_echo_alone_is_not_believed_before_its_cause_had_time_to_show() -> None:
    seen = observing(a_job().nodes(2)).training().failed_pod(0, FailureClass.COLLECTIVE).batch_job_failed()
    early = reconcile(seen.build(), T0)
    assert early.status is None or early.status.attempt == 0
    assert early.requeue_after_seconds is not None
    assert written(reconcile(seen.build(), after(30))).attempts[0].failure is FailureClass.COLLECTIVE
    cause = seen.failed_pod(1, FailureClass.NON_FINITE)
    assert written(reconcile(cause.build(), T0)).attempts[0].failure is FailureClass.NON_FINITE


def test_a_job_that_somebody_deletes_is_the_infrastructures_failure() -> None:
    seen = observing(a_job()).training()
    gone = reconcile(replace(seen, batch_jobs=(), pods=()).build(), T0)
    assert (written(gone).attempt, written(gone).restarts.uncounted) == (1, 1)
    going = reconcile(seen.batch_job(deleting=True).build(), T0)
    assert (written(going).attempt, written(going).restarts.uncounted) == (1, 1)


def test_no_evidence_is_unknown_and_not_counted() -> None:
    actions = reconcile(replace(observing(a_job()).training(), pods=()).batch_job_failed().build(), after(60))
    assert written(actions).attempts[0].failure is FailureClass.UNKNOWN
    assert written(actions).restarts.counted == 0


def test_a_queue_that_holds_the_job_back_is_no_failure() -> None:
    seen = observing(a_job()).training().pod(0, deletion_requested=after(-5), exit_code=50).batch_job(suspended=True)
    actions = reconcile(seen.build(), after(100_000))
    assert condition(actions, ConditionType.READY) == ("False", Reason.QUEUED)
    assert written(actions).attempt == 0
    assert (written(actions).restarts.counted, written(actions).restarts.uncounted) == (0, 0)
    assert written(actions).attempts[0].interruptions == 1
    assert (written(actions).attempts[0].outcome, deleted(actions)) == ("Running", [])
    later = reconcile(replace(seen, status=written(actions)).build(), after(100_001))
    assert later.status is None, "a preemption is told once"


def test_success_closes_the_attempt_and_keeps_the_last_progress() -> None:
    facts = Progress(attempt=0, step=10, total_steps=10, loss=1.25, eval_loss=1.5, initial_eval_loss=3.0).facts()
    actions = reconcile(observing(a_job()).training().succeeded(**facts).build(), T0)
    assert condition(actions, ConditionType.TRAINED) == ("True", Reason.COMPLETED)
    status = written(actions)
    assert status.attempts[0].outcome == "Succeeded"
    assert (status.progress.summary, status.progress.loss, status.progress.initial_eval_loss) == ("10/10", "1.25", "3")


def test_progress_is_copied_from_the_current_attempt_only() -> None:
    seen = observing(a_job()).training(attempt=1)
    current = reconcile(seen.but(progress=Progress(attempt=1, step=3, total_steps=10, loss=2.0)).build(), T0)
    assert written(current).progress is not None
    earlier = reconcile(seen.but(progress=Progress(attempt=0, step=9, total_steps=10)).build(), T0)
    assert earlier.status is None or earlier.status.progress is None


def test_a_job_of_a_later_attempt_than_status_knows_stops_everything() -> None:
    actions = reconcile(observing(a_job()).prepared().batch_job(attempt=4).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.CONFLICT)
    assert created(actions) == []


def test_a_gang_whose_failure_is_not_explained_yet_is_not_ready() -> None:
    """One rank has seen nothing but a failed collective: the cause exits later."""
    seen = observing(a_job().nodes(2)).training().failed_pod(0, FailureClass.COLLECTIVE)
    actions = reconcile(seen.build(), T0)
    assert deleted(actions) == []
    assert condition(actions, ConditionType.READY) == ("False", Reason.RUNNING)
    assert message(actions, ConditionType.TRAINED) == "Attempt 0 fails; waiting for the cause."

"""GPU seconds of attempts: what is counted, when, and into which of the three."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune_job.api.status import FineTuneJobStatus, GpuSeconds, ProgressStatus
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.gang.attempts import record_of
from finetune_operator.decide.gang.gpu_seconds import HeldSeconds, held_seconds
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import PodView
from finetune_operator.decide.seen.times import timestamp
from tests.support.builders import T0, ObservedBuilder, a_job, after, observing

GPUS = 4


def pod(scheduled: float | None, started: float | None = None, finished: float | None = None) -> PodView:
    moments = {
        name: None if seconds is None else after(seconds)
        for name, seconds in (("scheduled", scheduled), ("started", started), ("finished", finished))
    }
    return replace(PodView("tune-train-0-0", "uid", Role.TRAIN, 0, created=T0, phase="Running"), **moments)


@pytest.mark.parametrize(
    ("pods", "since", "now", "saved", "held"),
    [
        # Two pods, one of which has ended.
        ([pod(10, 40, 100), pod(10, 50)], None, 200, None, HeldSeconds(70, 0, 210)),
        # A checkpoint in the middle; before the start of the pod; after its end.
        ([pod(10, 40, 100)], None, 200, 70, HeldSeconds(30, 30, 30)),
        ([pod(10, 40, 100)], None, 200, 20, HeldSeconds(30, 0, 60)),
        ([pod(10, 40, 100)], None, 200, 150, HeldSeconds(30, 60, 0)),
        # A part is counted already.
        ([pod(10, 40, 100)], 25, 200, None, HeldSeconds(15, 0, 60)),
        ([pod(10, 40, 100)], 60, 90, 70, HeldSeconds(0, 10, 20)),
        ([pod(10, 40, 100)], 300, 200, None, HeldSeconds()),
        # Without a node, without a start, and in a fraction of a second.
        ([pod(None)], None, 200, None, HeldSeconds()),
        ([pod(10)], None, 60, None, HeldSeconds(50, 0, 0)),
        ([pod(10, 40)], None, 60.9, None, HeldSeconds(30, 0, 20)),
        # The pod knows nothing of its scheduling.
        ([pod(None, 40)], None, 60, None, HeldSeconds(0, 0, 20)),
    ],
)
def test_what_pods_hold_is_distinguished(
    pods: list[PodView], since: float | None, now: float, saved: float | None, held: HeldSeconds
) -> None:
    moments = [None if each is None else after(each) for each in (since, saved)]
    assert held_seconds(pods, moments[0], after(now), moments[1]) == held


def test_a_pod_that_vanished_without_a_report_held_its_gpus_until_it_was_due() -> None:
    gone = replace(pod(0, 10), gone=True, deletion_requested=after(20), deletion_due=after(50))
    assert held_seconds([gone], None, after(200), None).unsaved == 40
    assert held_seconds([replace(gone, deletion_due=None)], None, after(200), None).unsaved == 10
    assert held_seconds([replace(gone, gone=False)], None, after(200), None).unsaved == 190, "it still holds them"


def training(**progress: object) -> ObservedBuilder:
    """Two pods of four GPUs, scheduled 300 s ago, started 290 s ago; the newest checkpoint is 100 s old."""
    seen = observing(a_job().nodes(2).processes_per_node(GPUS)).training()
    seen = seen.pod(0, scheduled=after(-300)).pod(1, scheduled=after(-300))
    known = {"step": 5, "checkpoint_step": 5, "checkpoint_time": timestamp(after(-100)), **progress}
    return seen.with_status(progress=ProgressStatus.model_validate(known))


def decided(seen: ObservedBuilder) -> FineTuneJobStatus:
    status = reconcile(seen.build(), T0).status
    assert status is not None
    return status


def test_a_failed_attempt_keeps_what_its_checkpoint_keeps() -> None:
    status = decided(training().failed_pod(0, FailureClass.COLLECTIVE).pod(1, exit_code=1).batch_job_failed())
    spent = GpuSeconds(waiting=2 * GPUS * 10, productive=2 * GPUS * 190, lost=2 * GPUS * 99)
    record = record_of(status, Role.TRAIN, 0)
    assert (record.outcome, record.gpu_seconds) == (AttemptOutcome.FAILED, spent)
    assert (status.attempt, status.gpu_seconds, status.gpu_seconds_until) == (1, spent, timestamp(T0))


KEPT = GpuSeconds(waiting=2 * GPUS * 10, productive=2 * GPUS * 290)


def test_what_an_orderly_end_saves_is_kept() -> None:
    suspended = training()
    suspended = suspended.but(job=suspended.job.run(suspend=True))
    preempted = training().failed_pod(0, FailureClass.PREEMPTED).failed_pod(1, FailureClass.PREEMPTED).batch_job_failed()
    for seen, kept in (
        (suspended, KEPT),
        (training().succeeded(), GpuSeconds(waiting=2 * GPUS * 10, productive=2 * GPUS * 289)),
        (preempted, GpuSeconds(waiting=2 * GPUS * 10, productive=2 * GPUS * 289)),
    ):
        status = decided(seen)
        assert status.gpu_seconds == kept
        assert status.attempts[-1].gpu_seconds == kept


def test_an_interruption_by_a_queue_is_counted_at_once_and_not_again() -> None:
    seen = training().batch_job(suspended=True, start_time=None)
    status = decided(seen)
    assert (status.attempts[-1].interruptions, status.attempts[-1].gpu_seconds, status.gpu_seconds) == (1, KEPT, KEPT)
    # The pods of that time are still known when the next ones end.
    again = seen.with_status(**{name: getattr(status, name) for name in FineTuneJobStatus.model_fields})
    again = again.pod(0, gone=True, finished=after(5)).pod(1, gone=True, finished=after(5))
    later = [replace(each, name=f"{each.name}-b", uid=f"{each.uid}-b", gone=False) for each in again.build().pods]
    later = [replace(each, scheduled=after(100), started=after(110), finished=None) for each in later]
    again = again.but(pods=(*again.pods, *later), job=again.job.run(suspend=True)).batch_job()
    status = reconcile(again.build(), after(200)).status
    # Five seconds to end, and a hundred of the second life.
    total = GpuSeconds(waiting=2 * GPUS * 20, productive=2 * GPUS * (290 + 5 + 90))
    assert (status.attempts[-1].gpu_seconds, status.gpu_seconds) == (total, total)


def test_the_sum_outlives_the_history() -> None:
    before = GpuSeconds(waiting=1, productive=2, lost=3)
    seen = training().with_status(gpu_seconds=before, gpu_seconds_until=timestamp(after(-1000)))
    status = decided(seen.succeeded())
    assert status.gpu_seconds == GpuSeconds(waiting=1 + 80, productive=2 + 2 * GPUS * 289, lost=3)


def test_a_gang_that_waits_for_its_last_pod_is_counted_when_the_job_ends_or_is_deleted() -> None:
    seen = observing(a_job().nodes(2).processes_per_node(GPUS)).prepared().batch_job().pod(0, scheduled=after(-60))
    held = GpuSeconds(waiting=GPUS * 60)
    cancelled = decided(seen.but(job=seen.job.run(cancel=True)))
    assert (cancelled.gpu_seconds, [each.role for each in cancelled.attempts]) == (held, [])
    observed = seen.build()
    deleted = reconcile(replace(observed, job=replace(observed.job, deleting=True)), T0).status
    assert deleted.gpu_seconds == held
    # While it waits nothing is written for this alone.
    assert decided(seen).gpu_seconds is None


def test_a_deleted_job_that_a_finalizer_holds_is_counted_with_each_write() -> None:
    observed = training().build()
    status = reconcile(replace(observed, job=replace(observed.job, deleting=True)), T0).status
    assert status.attempts[-1].gpu_seconds == GpuSeconds(waiting=80, productive=2 * GPUS * 190, lost=2 * GPUS * 100)


def test_pods_that_vanished_while_no_operator_ran_are_taken_from_the_record() -> None:
    times = {"scheduled_time": timestamp(after(-300)), "running_time": timestamp(after(-290))}
    seen = training(advanced_time=timestamp(after(-40)))
    record = seen.status.attempts[0].model_copy(update=times)
    lost = seen.with_status(attempts=[record]).but(pods=(), batch_jobs=())
    status = decided(lost)
    assert status.attempts[0].gpu_seconds == GpuSeconds(waiting=80, productive=2 * GPUS * 190, lost=2 * GPUS * 60)
    # One of two is left. The other trained as long as this one.
    times = {"scheduled": after(-300), "started": after(-290), "finished": after(-10)}
    left = tuple(replace(pod, **times) for pod in seen.build().pods if pod.node_rank == 0)
    assert len(left) == 1
    some = decided(seen.with_status(attempts=[record]).but(pods=left, batch_jobs=()))
    assert some.attempts[0].gpu_seconds == GpuSeconds(waiting=80, productive=2 * GPUS * 190, lost=2 * GPUS * 90)
    # The record does not know when the second life of an interrupted attempt began.
    unknown = lost.with_status(attempts=[record.model_copy(update={"interruptions": 1})])
    assert decided(unknown).gpu_seconds is None


def test_nothing_is_counted_on_the_cpu_and_without_a_plan() -> None:
    on_cpu = observing(a_job().with_profile(gpu=None)).training().pod(0, scheduled=after(-300))
    assert decided(on_cpu.succeeded()).gpu_seconds is None
    cancelled = training().but(plan_json=None)
    assert decided(cancelled.but(job=cancelled.job.run(cancel=True))).gpu_seconds is None


def test_an_end_of_the_job_after_the_training_adds_nothing() -> None:
    trained = decided(training().succeeded())
    kept = {name: getattr(trained, name) for name in ("attempts", "gpu_seconds", "gpu_seconds_until", "conditions")}
    seen = training().succeeded().with_status(**kept).condition(ConditionType.TRAINED, True, Reason.COMPLETED)
    status = reconcile(seen.but(job=seen.job.run(cancel=True)).build(), after(500)).status
    assert status.gpu_seconds == trained.gpu_seconds

"""What was trained is never lost to what comes after it, nor to a cluster that has no room or loses a node."""

from dataclasses import replace

import pytest

from finetune_job.api.status import ProgressStatus, Restarts, RoleRestarts
from finetune_job.failures import FailureClass
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.observed import ProfileView
from tests.support.builders import T0, ObservedBuilder, a_job, a_profile, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

MERGE_ENDS_FOR_NOW = [
    FailureClass.HOST_OUT_OF_MEMORY,
    FailureClass.USER_CONFIG,
    FailureClass.USER_MODEL,
    FailureClass.PLAN_MISMATCH,
    FailureClass.NON_FINITE,
]


def a_merge_that_failed(failure: FailureClass, **restarts: int) -> ObservedBuilder:
    seen = observing(a_job().run(maxRestarts=3)).trained()
    seen = seen.with_status(role_restarts=RoleRestarts(merge=Restarts(**restarts)))
    return seen.failed_pod(0, failure, message="no space left").batch_job_failed()


@pytest.mark.parametrize("failure", MERGE_ENDS_FOR_NOW)
def test_a_merge_that_would_fail_again_stalls_with_everything_kept(failure: FailureClass) -> None:
    actions = reconcile(a_merge_that_failed(failure).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.MERGE_STOPPED)
    assert condition(actions, ConditionType.MERGED) == ("False", Reason.MERGE_STOPPED)
    assert condition(actions, ConditionType.SUCCEEDED)[0] == "Unknown"
    assert condition(actions, ConditionType.FINISHED)[0] == "False"
    assert "increase spec.run.retry; what was trained is kept on the workspace" in message(actions, ConditionType.STALLED)


def test_a_full_disk_is_tried_within_the_merges_own_budget_with_pauses_and_then_waits_for_a_human() -> None:
    first = reconcile(a_merge_that_failed(FailureClass.DISK_FULL).build(), T0)
    assert (written(first).merge_attempt, written(first).role_restarts.merge.counted) == (1, 1)
    waiting = replace(a_merge_that_failed(FailureClass.DISK_FULL), status=written(first), batch_jobs=(), pods=()).nothing_left()
    assert created(reconcile(waiting.build(), after(47))) == [], "not four tries in seconds"
    assert created(reconcile(waiting.build(), after(60))) == ["Job/tune-merge-1"]
    last = reconcile(a_merge_that_failed(FailureClass.DISK_FULL, counted=3, in_a_row=3).build(), T0)
    assert condition(last, ConditionType.STALLED) == ("True", Reason.MERGE_STOPPED)
    assert condition(last, ConditionType.FINISHED)[0] == "False"


def test_a_merge_has_its_budget_although_training_has_spent_its_own() -> None:
    seen = a_merge_that_failed(FailureClass.INTERNAL).restarts(counted=3, uncounted=49)
    actions = reconcile(seen.build(), T0)
    assert (written(actions).merge_attempt, written(actions).role_restarts.merge.counted) == (1, 1)
    assert (written(actions).restarts.counted, written(actions).restarts.uncounted) == (3, 49)


def test_retry_gives_a_stopped_merge_a_full_budget_and_the_profiles_present_memory() -> None:
    seen = a_merge_that_failed(FailureClass.HOST_OUT_OF_MEMORY, counted=3, in_a_row=3)
    stopped = replace(seen, status=written(reconcile(seen.build(), T0)))
    assert reconcile(stopped.build(), after(1000)).status is None, "it rests"
    larger = ProfileView("default", a_profile(resources={"merge": {"memory": "200Gi"}}))
    asked = replace(stopped, job=a_job().run(maxRestarts=3, retry=1), profile=larger)
    again = reconcile(asked.build(), after(1000))
    assert (written(again).merge_attempt, written(again).retry_handled) == (1, 1)
    assert written(again).role_restarts.merge == Restarts()
    gone = replace(asked, status=written(again), batch_jobs=(), pods=()).nothing_left()
    (job,) = reconcile(gone.build(), after(1001)).creates
    container = job.body["spec"]["template"]["spec"]["containers"][0]
    assert (job.name, container["resources"]["limits"]["memory"]) == ("tune-merge-1", "200Gi")


@pytest.mark.parametrize("seconds", [0, 1_900, 10**7])
def test_a_merge_that_nobody_has_room_for_waits_without_end(seconds: int) -> None:
    seen = observing(a_job()).trained().batch_job().pod(0, unschedulable="0/9 nodes are available: 9 Insufficient memory.")
    actions = reconcile(seen.build(), after(seconds))
    assert condition(actions, ConditionType.MERGED) == ("Unknown", Reason.UNSCHEDULABLE)
    assert condition(actions, ConditionType.STALLED)[0] == "False"
    assert "Insufficient memory" in message(actions, ConditionType.READY)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_gang_waits_for_capacity_without_end(attempt: int) -> None:
    seen = observing(a_job().nodes(2)).training(attempt).pod(1, phase="Pending", started=None, unschedulable="no GPU")
    actions = reconcile(seen.build(), after(10**7))
    assert (written(actions).attempt, deleted(actions)) == (attempt, [])
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", Reason.UNSCHEDULABLE)
    assert [event.reason for event in actions.events] == [Reason.UNSCHEDULABLE]
    told = reconcile(replace(seen, status=written(actions)).build(), after(10**7 + 60))
    assert (told.status, told.events) == (None, ()), "said once"


def test_a_gang_with_a_checkpoint_that_cannot_start_is_tried_again_and_never_failed() -> None:
    seen = observing(a_job().run(startupDeadlineSeconds=100, maxRestarts=0)).training(attempt=2)
    seen = seen.with_status(progress=ProgressStatus(step=100, total_steps=200, checkpoint_step=100))
    stuck = seen.pod(0, phase="Pending", started=None, scheduled=after(-150), waiting_reason="ErrImagePull")
    actions = reconcile(stuck.build(), T0)
    status = written(actions)
    assert (status.attempt, status.restarts.counted, status.restarts.uncounted) == (3, 0, 1)
    assert status.attempts[-1].failure is FailureClass.IMAGE_PULL
    assert deleted(actions) == ["Job/tune-train-2"], "its other pods hold accelerators"
    spent = stuck.with_status(restarts=Restarts(uncounted=5, in_a_row=5, at_checkpoint=100))
    stopped = reconcile(spent.build(), T0)
    assert condition(stopped, ConditionType.STALLED) == ("True", Reason.TRAIN_STOPPED)
    assert condition(stopped, ConditionType.FINISHED)[0] == "False"
    assert deleted(stopped) == ["Job/tune-train-2"]
    retried = replace(spent, status=written(stopped), job=a_job().run(retry=1), batch_jobs=(), pods=())
    again = written(reconcile(retried.build(), T0))
    assert (again.attempt, again.restarts) == (3, Restarts())


@pytest.mark.parametrize("role", ["merge", "publish"])
def test_what_comes_after_the_training_and_cannot_start_waits_for_a_human_and_continues_by_itself(role: str) -> None:
    seen = observing(a_job().run(startupDeadlineSeconds=100))
    seen = (seen.trained() if role == "merge" else seen.merged()).batch_job().pod(0, waiting_reason="ErrImagePull")
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)
    assert condition(actions, ConditionType.SUCCEEDED)[0] == "Unknown"
    assert condition(actions, ConditionType.FINISHED)[0] == "False"
    assert deleted(actions) == []
    fixed = replace(seen, status=written(actions)).running()
    assert condition(reconcile(fixed.build(), after(60)), ConditionType.STALLED)[0] == "False"


@pytest.mark.parametrize("role", ["preflight", "train"])
def test_before_anything_is_trained_pods_that_cannot_start_end_the_job(role: str) -> None:
    job = a_job().run(startupDeadlineSeconds=100)
    seen = observing(job).started().batch_job() if role == "preflight" else observing(job).prepared().batch_job()
    seen = seen.but(service_exists=True).pod(0, waiting_reason="ErrImagePull")
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.SUCCEEDED) == ("False", Reason.STARTUP_DEADLINE_EXCEEDED)
    assert deleted(actions) == [f"Job/tune-{role}-0"]


@pytest.mark.parametrize(
    ("failure", "ends"),
    [
        (FailureClass.DISK_FULL, False),
        (FailureClass.PLAN_MISMATCH, False),
        (FailureClass.INTERNAL, True),
        (FailureClass.CHECKPOINT_INVALID, True),
    ],
)
def test_a_training_that_is_given_up_fails_only_for_causes_in_the_job(failure: FailureClass, ends: bool) -> None:
    seen = observing(a_job().run(maxRestarts=0)).training().failed_pod(0, failure).batch_job_failed()
    actions = reconcile(seen.nothing_left().build(), T0)
    assert condition(actions, ConditionType.FINISHED) == (
        ("True", Reason.RESTARTS_EXHAUSTED) if ends else ("False", Reason.RUNNING)
    )
    assert condition(actions, ConditionType.STALLED) == (("False", Reason.HEALTHY) if ends else ("True", Reason.TRAIN_STOPPED))


def test_a_verdict_on_the_weights_is_final() -> None:
    actions = reconcile(a_merge_that_failed(FailureClass.VERIFICATION_FAILED).nothing_left().build(), T0)
    assert condition(actions, ConditionType.FINISHED) == ("True", Reason.VERIFICATION_FAILED)
    assert written(actions).artifacts == []

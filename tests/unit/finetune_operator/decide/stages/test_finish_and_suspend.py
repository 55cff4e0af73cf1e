"""Merge and success, cancellation, suspension, deadlines, a lost plan, and what is left in the end."""

from dataclasses import replace

import pytest

from finetune_job.failures import FailureClass
from finetune_job.plan.digest import canonical_json
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import LiveChildren, LiveJob, LivePod, PolicyView
from finetune_operator.decide.stages.blocked import needs_live_list
from finetune_operator.decide.stages.finish import has_expired
from tests.support.builders import T0, JobBuilder, ObservedBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

DIGESTS = {"adapter_sha256": "a" * 64, "merged_manifest_sha256": "b" * 64}


def test_a_merged_and_verified_model_is_success_with_its_artifacts() -> None:
    actions = reconcile(observing(a_job()).trained().succeeded(**DIGESTS).build(), T0)
    status = written(actions)
    assert status.phase == "Succeeded"
    assert created(actions) == []
    for kind in (ConditionType.MERGED, ConditionType.PUBLISHED, ConditionType.FINISHED):
        assert condition(actions, kind) == ("True", Reason.COMPLETED)
    assert [(one.name, one.path, one.sha256[:1]) for one in status.artifacts] == [
        ("adapter", "pvc://results/tune/adapter", "a"),
        ("merged", "pvc://results/tune/merged", "b"),
        ("verification", "pvc://results/tune/verification.json", ""),
        ("model-card", "pvc://results/tune/README.md", ""),
        ("provenance", "pvc://results/tune/provenance.json", ""),
        ("checksums", "pvc://results/tune/SHA256SUMS", ""),
    ]


@pytest.mark.parametrize("job", [a_job().spec("merge.enabled", False), a_job().spec("method", {"type": "Full"})])
def test_where_nothing_is_merged_the_job_still_lays_down_its_results(job: JobBuilder) -> None:
    assert created(reconcile(observing(job).trained().build(), T0)) == ["Job/tune-merge-0"]
    actions = reconcile(observing(job).trained().succeeded().build(), T0)
    assert condition(actions, ConditionType.MERGED) == ("True", Reason.SKIPPED)
    assert written(actions).phase == "Succeeded"


STAGES = {
    "before the start": observing,
    "after the freeze": lambda job: observing(job).frozen(),
    "in preflight": lambda job: observing(job).started().batch_job().running(),
    "in training": lambda job: observing(job).training(),
    "in the merge": lambda job: observing(job).trained().batch_job().running(),
    "in publication": lambda job: observing(job).merged().batch_job().running(),
}


@pytest.mark.parametrize("stage", STAGES)
def test_cancellation_ends_the_job_and_stops_what_runs(stage: str) -> None:
    seen: ObservedBuilder = STAGES[stage](a_job().run(cancel=True))
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.SUCCEEDED) == ("False", Reason.CANCELLED)
    assert created(actions) == []
    assert deleted(actions) == [f"Job/{job.name}" for job in seen.batch_jobs]
    assert all(one.outcome != "Running" for one in written(actions).attempts)
    may_run = stage != "before the start"
    assert condition(actions, ConditionType.FINISHED) == (("False", Reason.STOPPING) if may_run else ("True", Reason.CANCELLED))
    assert written(actions).phase == ("Stopping" if may_run else "Cancelled")
    assert actions.requeue_after_seconds == (30 if may_run else None), "every event about the last pods may be lost"


def test_a_job_is_finished_only_once_nothing_of_it_runs() -> None:
    seen = observing(a_job().run(cancel=True)).training()
    ended = replace(seen, status=written(reconcile(seen.build(), T0)))
    assert ended.status.completion_time == ""
    still = reconcile(ended.batch_job(deleting=True).pod(0, deletion_requested=T0).build(), after(60))
    assert (still.status is None or still.status.completion_time == "", created(still)) == (True, [])
    assert "pod tune-train-0-0 on node node-a" in (ended.status.conditions[-3].message)
    gone = reconcile(replace(ended, batch_jobs=(), pods=()).nothing_left().build(), after(90))
    assert condition(gone, ConditionType.FINISHED) == ("True", Reason.CANCELLED)
    assert (written(gone).completion_time, written(gone).phase) == ("2026-01-01T12:01:30Z", "Cancelled")


def test_a_gang_that_failed_is_finished_only_once_a_live_list_shows_no_other_rank() -> None:
    """The Job's failure may be heard of before the pods of its other ranks."""
    failed = observing(a_job().nodes(2)).training().but(pods=()).failed_pod(0, FailureClass.NON_FINITE).batch_job_failed()
    first = reconcile(failed.build(), T0)
    assert condition(first, ConditionType.SUCCEEDED) == ("False", Reason.FAILED)
    assert condition(first, ConditionType.FINISHED) == ("False", Reason.STOPPING)
    assert message(first, ConditionType.FINISHED) == "Checking whether anything of it is still running."
    assert written(first).completion_time == ""
    ended = replace(failed, status=written(first))
    assert needs_live_list(ended.build())
    unheard = LivePod("tune-train-0-1-x", "uid-9", node="node-b", deletion_due=after(30))
    still = reconcile(ended.but(live=LiveChildren(running_pods=(unheard,))).build(), T0)
    assert message(still, ConditionType.FINISHED) == "Waiting until pod tune-train-0-1-x on node node-b has ended."
    gone = reconcile(ended.nothing_left().build(), after(9))
    assert condition(gone, ConditionType.FINISHED) == ("True", Reason.FAILED)
    assert written(gone).completion_time == "2026-01-01T12:00:09Z"


def test_a_job_that_never_started_and_one_that_succeeded_are_finished_at_once() -> None:
    for seen in (observing(a_job().run(cancel=True)), observing(a_job()).trained().succeeded(**DIGESTS)):
        assert condition(reconcile(seen.build(), T0), ConditionType.FINISHED)[0] == "True"


def test_an_end_that_waited_for_pods_is_finished_by_a_live_list() -> None:
    stopping = observing(a_job().run(cancel=True)).training()
    status = written(reconcile(stopping.build(), T0))
    gone = replace(stopping, status=status, batch_jobs=(), pods=())
    hidden = LivePod("tune-train-0-1-x", "uid-9", node="node-b")
    unlabelled = LiveJob("tune-train-0", "uid-7")
    orphan = LivePod("tune-train-0-0-x", "uid-8", node="node-a", orphaned=True)
    assert needs_live_list(gone.build())
    seen = reconcile(gone.but(live=LiveChildren((unlabelled,), (hidden, orphan))).build(), T0)
    assert condition(seen, ConditionType.FINISHED) == ("False", Reason.STOPPING)
    assert message(seen, ConditionType.FINISHED) == (
        "Waiting until pod tune-train-0-1-x on node node-b, pod tune-train-0-0-x on node node-a has ended."
    )
    assert [(one.kind, one.uid) for one in seen.deletes] == [("Job", "uid-7"), ("Pod", "uid-8")]
    job_alone = reconcile(gone.but(live=LiveChildren((LiveJob("tune-train-0", "uid-7", deleting=True),))).build(), T0)
    assert message(job_alone, ConditionType.FINISHED) == "Waiting until Job tune-train-0 has ended."
    assert job_alone.deletes == ()
    ended = reconcile(gone.but(live=LiveChildren()).build(), T0)
    assert condition(ended, ConditionType.FINISHED)[0] == "True"
    finished = replace(gone, status=written(ended))
    assert not needs_live_list(finished.build()), "an end is final, and costs no list any more"


def test_an_outcome_in_words_of_another_release_still_comes_to_its_end() -> None:
    seen = observing(a_job().run(cancel=True)).training()
    status = written(reconcile(seen.build(), T0))
    foreign = [
        one.model_copy(update={"reason": "WordOfAnotherRelease"}) if one.type is ConditionType.SUCCEEDED else one
        for one in status.conditions
    ]
    ended = replace(seen, status=status.model_copy(update={"conditions": foreign}), batch_jobs=(), pods=()).nothing_left()
    assert condition(reconcile(ended.build(), T0), ConditionType.FINISHED)[0] == "True"


def test_a_job_that_is_suspended_says_so_and_that_its_checkpoint_is_kept() -> None:
    actions = reconcile(observing(a_job().run(suspend=True)).training().build(), T0)
    said = "spec.run.suspend is true; the checkpoint is kept."
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", Reason.SUSPENDED_BY_USER)
    assert message(actions, ConditionType.TRAINED) == said
    assert condition(actions, ConditionType.READY) == ("False", Reason.SUSPENDED_BY_USER)
    assert [(one.type, one.message) for one in actions.events] == [("Normal", f"Attempt 0 of train is stopped; {said}")]


def test_a_job_without_its_label_does_not_run_on_while_the_finetune_job_is_suspended() -> None:
    seen = observing(a_job().run(suspend=True)).prepared().but(live=LiveChildren((LiveJob("tune-train-0", "uid-7"),)))
    assert [(one.kind, one.uid) for one in reconcile(seen.build(), T0).deletes] == [("Job", "uid-7")]


def test_a_suspended_job_whose_training_is_done_is_not_run_again() -> None:
    seen = observing(a_job().run(suspend=True)).training().succeeded()
    actions = reconcile(seen.build(), T0)
    assert (written(actions).attempt, deleted(actions)) == (0, [])
    resumed = reconcile(replace(seen, status=written(actions), job=a_job()).build(), T0)
    assert condition(resumed, ConditionType.TRAINED) == ("True", Reason.COMPLETED)


def test_the_active_deadline_ends_the_job() -> None:
    job = a_job().run(activeDeadlineSeconds=700)  # the builder's job started 600 s ago
    early = reconcile(observing(job).training().build(), T0)
    assert early.requeue_after_seconds == 100
    late = reconcile(observing(job).training().build(), after(100))
    assert condition(late, ConditionType.SUCCEEDED) == ("False", Reason.ACTIVE_DEADLINE_EXCEEDED)
    assert deleted(late) == ["Job/tune-train-0"]
    assert written(late).attempts[0].outcome == "Failed"


def test_the_startup_deadline_ends_the_job_and_says_what_the_pod_waited_for() -> None:
    job = a_job().run(startupDeadlineSeconds=400)  # the builder's Job is 300 s old, and its pod was placed 200 s ago
    waiting = observing(job).prepared().but(service_exists=True).batch_job()
    waiting = waiting.pod(0, scheduled=after(-200), waiting_reason="ImagePullBackOff")
    assert reconcile(waiting.build(), T0).requeue_after_seconds == 200
    late = reconcile(waiting.build(), after(200))
    assert condition(late, ConditionType.SUCCEEDED) == ("False", Reason.STARTUP_DEADLINE_EXCEEDED)
    assert "ImagePullBackOff" in message(late, ConditionType.SUCCEEDED)
    assert deleted(late) == ["Job/tune-train-0"]


def test_a_pass_that_ends_the_job_creates_nothing_that_a_stage_wanted_before() -> None:
    """Somebody has deleted the Service, which is made again for a gang that waits, and its pods have not started in time."""
    waiting = observing(a_job().run(startupDeadlineSeconds=400)).prepared().batch_job()
    waiting = waiting.pod(0, scheduled=after(-200), waiting_reason="ImagePullBackOff")
    assert created(reconcile(waiting.build(), T0)) == ["Service/tune-gang"]
    late = reconcile(waiting.build(), after(200))
    assert condition(late, ConditionType.SUCCEEDED) == ("False", Reason.STARTUP_DEADLINE_EXCEEDED)
    assert (created(late), deleted(late)) == ([], ["Job/tune-train-0"])


def test_the_startup_deadline_does_not_hold_for_a_gang_that_runs() -> None:
    actions = reconcile(observing(a_job().run(startupDeadlineSeconds=10)).training().build(), T0)
    assert actions.status is None or actions.status.completion_time == ""


LOSSES = {"the ConfigMap is gone": None, "it holds another plan": canonical_json(a_job().nodes(2).plan()), "it holds nothing": ""}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_plan_stalls_the_job_keeps_its_children_and_is_never_resolved_again(loss: str) -> None:
    for seen in (observing(a_job()).training(), observing(a_job()).prepared(), observing(a_job()).trained()):
        actions = reconcile(replace(seen, plan_json=LOSSES[loss]).build(), T0)
        assert condition(actions, ConditionType.STALLED) == ("True", Reason.PLAN_LOST)
        assert (created(actions), deleted(actions)) == ([], [])
        healed = reconcile(replace(seen, status=written(actions)).build(), T0)
        assert condition(healed, ConditionType.STALLED) == ("False", Reason.HEALTHY)


def test_a_workspace_claim_that_vanishes_after_the_start_is_not_made_again() -> None:
    job = a_job().spec("workspace", {"volumeClaimTemplate": {"storage": "10Gi"}})
    actions = reconcile(observing(job).prepared().but(missing_claims=frozenset({"tune-workspace"})).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.CLAIM_NOT_FOUND)
    assert created(actions) == []


def test_the_time_to_live_removes_children_and_not_before() -> None:
    job = a_job().run(ttlSecondsAfterFinished=60)
    seen = observing(job).trained().succeeded().but(service_exists=True)
    ended = replace(seen, status=written(reconcile(seen.build(), T0)))
    observed = replace(ended.build(), network_policies=(PolicyView("tune-run", "uid-run"),))
    early = reconcile(observed, after(10))
    assert (deleted(early), early.requeue_after_seconds) == ([], 50)
    late = reconcile(observed, after(60))
    assert deleted(late) == ["Job/tune-merge-0", "Service/tune-gang", "NetworkPolicy/tune-run", "ConfigMap/tune-plan"]
    assert [one.uid for one in late.deletes] == ["uid-merge-0", "uid-service", "uid-run", "uid-plan"]
    assert late.status is None


def test_what_no_watch_shows_is_looked_up_only_while_something_is_left_that_has_expired() -> None:
    job = a_job().run(ttlSecondsAfterFinished=60)
    seen = observing(job).trained().succeeded()
    running = seen.build()
    ended = replace(seen, status=written(reconcile(running, T0)), batch_jobs=()).build()
    assert [has_expired(ended, after(seconds)) for seconds in (59, 60, 10**6)] == [False, True, True]
    for bare, expected in (
        (replace(ended, plan=None), False),
        (replace(ended, plan=None, service_uid="uid"), True),
        (replace(ended, plan=None, batch_jobs=running.batch_jobs), True),
    ):
        assert has_expired(bare, after(60)) == expected
    assert not has_expired(running, after(10**6))


def test_without_a_time_to_live_the_ended_jobs_stay() -> None:
    seen = observing(a_job()).trained().succeeded()
    ended = replace(seen, status=written(reconcile(seen.build(), T0)))
    assert deleted(reconcile(ended.build(), after(10**8))) == []


def test_a_pass_over_a_state_that_needs_nothing_writes_nothing() -> None:
    seen = observing(a_job().nodes(2)).training()
    first = reconcile(seen.build(), T0)
    second = reconcile(replace(seen, status=written(first)).build(), after(5))
    assert (second.status, second.creates, second.deletes, second.events) == (None, (), (), ())

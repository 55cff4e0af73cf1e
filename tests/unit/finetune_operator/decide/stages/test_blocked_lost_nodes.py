"""A node that stops answering: told at once, nothing new next to what may still run there, and a limit."""

from dataclasses import replace

import pytest

from finetune_job.api.status import Attempt
from finetune_job.failures import FailureClass
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import LiveChildren, LiveJob, LivePod
from finetune_operator.decide.seen.observed import ProfileView
from finetune_operator.decide.seen.times import timestamp
from tests.support.builders import T0, ObservedBuilder, a_job, a_profile, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_pod_that_the_taint_manager_marked_is_lost_at_once_although_its_phase_is_running(nodes: int) -> None:
    seen = observing(a_job().nodes(nodes)).training()
    seen = seen.pod(0, disruption="DeletionByTaintManager", deletion_requested=T0, deletion_due=after(150), node="node-x")
    actions = reconcile(seen.build(), T0)
    status = written(actions)
    assert (status.attempt, status.restarts.counted, status.restarts.uncounted) == (1, 0, 1)
    assert status.attempts[0].failure is FailureClass.NODE_LOST
    assert status.attempts[0].evidence[0].node == "node-x"
    assert "node-x" in message(actions, ConditionType.TRAINED)
    assert deleted(actions) == ["Job/tune-train-0"]


def test_a_pod_that_is_still_there_after_its_grace_period_is_on_a_lost_node() -> None:
    seen = observing(a_job()).training().pod(0, deletion_requested=after(-150), deletion_due=T0, node="node-x")
    early = reconcile(seen.build(), after(29))
    assert early.status is None or early.status.attempt == 0
    assert early.requeue_after_seconds == 1
    late = reconcile(seen.build(), after(30))
    assert written(late).attempts[0].failure is FailureClass.NODE_LOST


def test_a_survivor_that_only_lost_its_collective_is_not_counted_while_a_pod_does_not_end() -> None:
    """Survivors notice a dead node before Kubernetes does. The Job controller has asked the other pod to end, and it does not."""
    seen = observing(a_job().nodes(2)).training().failed_pod(1, FailureClass.COLLECTIVE).batch_job_failed()
    seen = seen.pod(0, deletion_requested=T0, deletion_due=after(150), node="node-x")
    waiting = reconcile(seen.build(), after(100))
    assert waiting.status is None or waiting.status.attempt == 0
    assert waiting.requeue_after_seconds == 80
    late = written(reconcile(seen.build(), after(180)))
    assert (late.attempts[0].failure, late.restarts.counted, late.restarts.uncounted) == (FailureClass.NODE_LOST, 0, 1)
    ended = written(reconcile(seen.pod(0, exit_code=50, finished=after(2)).build(), after(3)))
    assert (ended.attempts[0].failure, ended.restarts.counted) == (FailureClass.COLLECTIVE, 1), "a healthy node ends its pod"


@pytest.mark.parametrize("disruption", ["EvictionByEvictionAPI", "PreemptionByScheduler", "TerminationByKubelet"])
def test_a_pod_that_was_evicted_from_a_node_that_then_stopped_answering_is_lost(disruption: str) -> None:
    seen = observing(a_job()).training().pod(0, disruption=disruption, deletion_requested=after(-150), deletion_due=T0)
    assert reconcile(seen.build(), after(29)).requeue_after_seconds == 1
    assert written(reconcile(seen.build(), after(31))).attempts[0].failure is FailureClass.NODE_LOST


def test_a_pod_that_is_being_evicted_may_save_first() -> None:
    seen = observing(a_job().nodes(2)).training()
    seen = seen.pod(0, disruption="EvictionByEvictionAPI", deletion_requested=T0, deletion_due=after(150))
    actions = reconcile(seen.build(), T0)
    assert actions.status is None or actions.status.attempt == 0
    assert deleted(actions) == []


def restarted(node: str = "node-x", overdue: float = 31.0, waited: float = 200.0) -> ObservedBuilder:
    """The gang's next attempt is due; a pod of the last one was to be gone so many seconds ago."""
    ended = Attempt(number=0, outcome="Failed", failure=FailureClass.NODE_LOST, end_time=timestamp(after(-waited)))
    pod = LivePod("tune-train-0-0-x", "uid-pod", node, deletion_due=after(-overdue))
    seen = observing(a_job()).prepared().attempt(1).with_status(attempts=[ended])
    return seen.but(live=LiveChildren((LiveJob("tune-train-0", "uid-job", deleting=True),), (pod,)))


def test_the_next_attempt_waits_for_the_node_by_name_and_nobody_is_killed_by_force() -> None:
    actions = reconcile(restarted().build(), T0)
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", Reason.BLOCKED_ON_NODE)
    assert condition(actions, ConditionType.READY) == ("False", Reason.BLOCKED_ON_NODE)
    assert "node-x" in message(actions, ConditionType.TRAINED)
    assert "node.kubernetes.io/out-of-service" in message(actions, ConditionType.TRAINED)
    assert written(actions).phase == "Restarting"
    assert [event.reason for event in actions.events] == [Reason.BLOCKED_ON_NODE]
    assert (created(actions), deleted(actions)) == ([], [])


def test_only_a_profile_that_allows_it_has_the_pod_deleted_by_force() -> None:
    allowed = ProfileView("default", a_profile(forceDeletePodsOfLostNodes=True))
    actions = reconcile(restarted().but(profile=allowed).build(), T0)
    assert [(one.kind, one.name, one.uid, one.force) for one in actions.deletes] == [("Pod", "tune-train-0-0-x", "uid-pod", True)]
    in_time = reconcile(restarted(overdue=-10).but(profile=allowed).build(), T0)
    assert in_time.deletes == (), "not within its grace period"


def test_a_node_that_does_not_answer_for_half_an_hour_needs_a_human() -> None:
    blocked = written(reconcile(restarted().build(), T0))
    early = reconcile(restarted().but(status=blocked).build(), after(1_768))
    assert early.status is None
    assert early.requeue_after_seconds == 1
    late = reconcile(restarted().but(status=blocked).build(), after(1_769))
    assert condition(late, ConditionType.STALLED) == ("True", Reason.BLOCKED_ON_NODE)
    freed = restarted().but(status=written(late), live=LiveChildren())
    assert "Job/tune-train-1" in created(reconcile(freed.build(), after(9_999))), "it continues by itself"


def test_an_earlier_attempt_that_ends_in_time_is_not_reported() -> None:
    actions = reconcile(restarted(overdue=-100, waited=5).build(), T0)
    assert (actions.status is None, created(actions), actions.requeue_after_seconds) == (True, [], 5.0)
    longer = reconcile(restarted(overdue=-100, waited=100).build(), T0)
    assert condition(longer, ConditionType.TRAINED) == ("Unknown", Reason.RESTARTING)
    assert "Job tune-train-0, pod tune-train-0-0-x" in message(longer, ConditionType.TRAINED)
    assert longer.requeue_after_seconds == 25.0


def test_a_job_whose_label_was_taken_off_is_found_by_the_live_list_and_deleted_by_uid() -> None:
    seen = observing(a_job()).prepared().attempt(1).but(live=LiveChildren(batch_jobs=(LiveJob("tune-train-0", "uid-7"),)))
    actions = reconcile(seen.build(), T0)
    assert [(one.kind, one.name, one.uid, one.force) for one in actions.deletes] == [("Job", "tune-train-0", "uid-7", False)]
    current = reconcile(seen.but(live=LiveChildren(batch_jobs=(LiveJob("tune-train-1", "uid-8"),))).build(), T0)
    assert (deleted(current), created(current)) == (["Job/tune-train-1"], []), "no watch would show how it ends"


def test_pods_that_somebody_orphaned_are_deleted_by_uid() -> None:
    orphan = LivePod("tune-train-0-0-x", "uid-9", orphaned=True)
    seen = observing(a_job()).prepared().attempt(1).but(live=LiveChildren(running_pods=(orphan,)))
    actions = reconcile(seen.build(), T0)
    assert [(one.kind, one.uid, one.force) for one in actions.deletes] == [("Pod", "uid-9", False)]
    assert created(actions) == []
    ending = seen.but(live=LiveChildren(running_pods=(replace(orphan, deletion_due=after(100)),)))
    assert deleted(reconcile(ending.build(), T0)) == []
    controlled = seen.but(live=LiveChildren(running_pods=(replace(orphan, orphaned=False),)))
    assert deleted(reconcile(controlled.build(), T0)) == [], "a label alone gets nothing deleted"


def test_a_first_job_that_was_to_be_created_before_is_looked_for_first() -> None:
    decided = observing(a_job()).prepared().condition(ConditionType.TRAINED, None, Reason.WAITING_FOR_PODS)
    assert created(reconcile(decided.build(), T0)) == []
    assert "Job/tune-train-0" in created(reconcile(decided.nothing_left().build(), T0))


def test_a_failure_on_a_node_whose_clock_is_behind_keeps_its_evidence() -> None:
    seen = (
        observing(a_job()).training().failed_pod(0, FailureClass.NON_FINITE).pod(0, finished=after(-4_000), started=after(-4_010))
    )
    actions = reconcile(seen.batch_job_failed().nothing_left().build(), T0)
    assert written(actions).attempts[0].failure is FailureClass.NON_FINITE
    assert condition(actions, ConditionType.FINISHED) == ("True", Reason.FAILED)

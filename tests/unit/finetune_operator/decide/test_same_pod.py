"""The next attempt of a gang of one pod in that pod: when, in which order, and what else keeps it from happening."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_job.api.status import Attempt, Restarts
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType
from finetune_operator.decide.actions import Relabel
from finetune_operator.decide.children_seen import ContainerEnd, PodView, RefusedWrite
from finetune_operator.decide.device_faults import nodes_in_question
from finetune_operator.decide.observed import NodeConditionView, NodeView
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, ObservedBuilder, a_job, after, envelope, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

TOLD = Relabel("tune-train-0-0", "uid-tune-train-0-0", 1)


def ended(failure: FailureClass = FailureClass.INTERNAL, **fields: Any) -> ContainerEnd:
    said = envelope(failure, node_rank=0, rank=0, step=7, message="rank 0 was killed")
    return ContainerEnd(after(-290), after(-3), EXIT_CODES[failure], "Error", said, **fields)


def started_again(failure: FailureClass = FailureClass.INTERNAL, **fields: Any) -> ObservedBuilder:
    """The container of the first attempt has failed, and the kubelet has started it again."""
    seen = observing(a_job()).training().batch_job(restarts_container=True)
    again = {"phase": "Running", "started": after(-2), "restarts": 1, "earlier": ended(failure), "label_attempt": 0}
    return seen.pod(0, **{**again, **fields})


def continued(**fields: Any) -> ObservedBuilder:
    """The second attempt of the pod: status has it, and the end of the first."""
    first = Attempt(number=0, start_time="2026-01-01T11:55:00Z", end_time="2026-01-01T11:59:57Z", continued=True)
    first = first.model_copy(update={"outcome": "Failed", "failure": FailureClass.INTERNAL, "counted": True})
    seen = started_again(**fields)
    return seen.with_status(attempt=1, attempts=[first], restarts=Restarts(counted=1, in_a_row=1))


@pytest.mark.parametrize("failure", [FailureClass.COLLECTIVE, FailureClass.INTERNAL, FailureClass.STALLED])
def test_the_end_and_the_new_number_are_written_and_the_pod_is_told_in_one_pass(failure: FailureClass) -> None:
    actions = reconcile(started_again(failure).build(), T0)
    status = written(actions)
    assert status.attempt == 1
    (first,) = status.attempts
    assert (first.outcome, first.failure, first.counted, first.continued) == ("Failed", failure, True, True)
    assert first.evidence[0].step == 7
    assert (actions.relabels, deleted(actions), created(actions)) == ((TOLD,), [], [])
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", "Restarting")
    assert message(actions, ConditionType.TRAINED).endswith(" Attempt 1 runs in the same pod.")
    assert "The next one runs in the same pod." in actions.events[0].message


@pytest.mark.parametrize(
    "fields",
    [
        {"restarts": 2},
        {"restarts": 1, "started": None, "waiting_reason": "CrashLoopBackOff"},
        {"restarts": 1, "exit_code": 52, "phase": "Running"},
        {"deletion_requested": after(-1)},
        {"disruption": "EvictionByEvictionAPI"},
        {"phase": "Failed"},
    ],
    ids=["twice", "waits", "ended again", "deleted", "evicted", "failed"],
)
def test_any_other_pod_is_followed_by_a_new_one(fields: dict[str, Any]) -> None:
    actions = reconcile(started_again(**fields).build(), T0)
    assert written(actions).attempt == 1
    assert written(actions).attempts[0].continued is False
    assert (actions.relabels, deleted(actions)) == ((), ["Job/tune-train-0"])


@pytest.mark.parametrize("failure", sorted(set(EXIT_CODES) - {"Collective", "Internal", "Stalled"}))
def test_no_other_class_continues_in_its_pod(failure: FailureClass) -> None:
    assert reconcile(started_again(failure).build(), T0).relabels == ()


def test_a_failure_that_a_condition_of_the_node_explains_leaves_the_node() -> None:
    job = a_job().with_profile(gpu={"memory": "80Gi", "faultConditions": [{"type": "GpuXidError"}]})
    fault = NodeConditionView("GpuXidError", "True", "Xid79", "GPU 3 has fallen off the bus", after(-20))
    seen = replace(started_again(node="node-b"), job=job).but(nodes_seen=(NodeView("node-b", (fault,)),))
    assert nodes_in_question(seen.build()) == ("node-b",)
    actions = reconcile(seen.build(), T0)
    assert written(actions).attempts[0].failure is FailureClass.DEVICE_FAULT
    assert (actions.relabels, deleted(actions)) == ((), ["Job/tune-train-0"])


@pytest.mark.parametrize("conditions", [("FailureTarget",), ("Failed",)])
def test_a_job_that_has_failed_has_no_second_attempt(conditions: tuple[str, ...]) -> None:
    seen = started_again().batch_job(*conditions, restarts_container=True)
    assert reconcile(seen.build(), T0).relabels == ()


def test_a_server_that_dropped_the_rule_starts_nothing_again() -> None:
    actions = reconcile(started_again().batch_job(restarts_container=False).build(), T0)
    assert (actions.relabels, deleted(actions)) == ((), ["Job/tune-train-0"])


def test_a_second_restart_in_a_row_pauses_and_gives_the_pod_back() -> None:
    row = Restarts(counted=1, in_a_row=1, in_a_row_since="2026-01-01T11:58:00Z")
    actions = reconcile(started_again().with_status(restarts=row).build(), T0)
    assert (actions.relabels, deleted(actions)) == ((), ["Job/tune-train-0"])
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", "BackingOff")


def test_without_restarts_left_the_waiting_container_goes() -> None:
    seen = started_again()
    seen = replace(seen, job=a_job().run(maxRestarts=0))
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.SUCCEEDED) == ("False", "RestartsExhausted")
    assert (actions.relabels, deleted(actions)) == ((), ["Job/tune-train-0"])
    (only,) = written(actions).attempts
    assert (only.failure, only.continued) == (FailureClass.INTERNAL, False)


def just_ended(code: int = 52, **fields: Any) -> ObservedBuilder:
    seen = observing(a_job()).training().batch_job(restarts_container=True)
    said = envelope(FailureClass.INTERNAL, node_rank=0, rank=0)
    return seen.pod(0, **{"exit_code": code, "phase": "Running", "termination_message": said, "finished": after(-1), **fields})


def test_a_failure_waits_ten_seconds_for_the_kubelet_to_start_the_container_again() -> None:
    actions = reconcile(just_ended().build(), T0)
    assert (deleted(actions), actions.requeue_after_seconds) == ([], 9.0)
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", "Running")
    late = reconcile(just_ended(finished=after(-10)).build(), T0)
    assert (written(late).attempt, deleted(late)) == (1, ["Job/tune-train-0"])


@pytest.mark.parametrize("fields", [{"phase": "Failed"}, {"code": 137}, {"code": 50}], ids=["failed", "killed", "preempted"])
def test_nobody_waits_for_what_the_kubelet_will_not_do(fields: dict[str, Any]) -> None:
    actions = reconcile(just_ended(**fields).build(), T0)
    assert (written(actions).attempt, deleted(actions)) == (1, ["Job/tune-train-0"])


def test_the_second_attempt_is_opened_from_the_end_of_the_first_and_keeps_its_job() -> None:
    actions = reconcile(continued(label_attempt=1).build(), T0)
    status = written(actions)
    assert (deleted(actions), created(actions), actions.relabels) == ([], [], ())
    second = status.attempts[-1]
    assert (second.number, second.outcome, second.start_time) == (1, "Running", "2026-01-01T11:59:57Z")
    assert (second.running_time, second.scheduled_time, second.prepared_time) == ("2026-01-01T11:59:58Z", "", "")
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", "Running")


def test_a_pod_that_was_not_told_is_told_again() -> None:
    assert reconcile(continued().build(), T0).relabels == (TOLD,)
    assert reconcile(continued(label_attempt=None).build(), T0).relabels == (TOLD,)
    assert reconcile(continued(deletion_requested=after(-1)).build(), T0).relabels == ()


def test_a_server_that_refuses_the_label_ends_the_attempt_with_its_words() -> None:
    refused = RefusedWrite("Pod", "tune-train-0-0", 403, "cannot patch pods", T0, 1, after(30))
    actions = reconcile(continued().but(refused_write=refused).build(), T0)
    status = written(actions)
    assert (status.attempt, deleted(actions), actions.relabels) == (2, ["Job/tune-train-0"], ())
    last = status.attempts[-1]
    assert (last.number, last.failure, last.counted, last.continued) == (1, FailureClass.INFRASTRUCTURE, False, False)
    assert "pod tune-train-0-0 continue (403): cannot patch pods" in last.message
    # The refusal of something else does not.
    other = replace(refused, kind="Job", name="tune-merge-0")
    assert reconcile(continued().but(refused_write=other).build(), T0).relabels == (TOLD,)


def test_the_second_attempt_fails_into_a_new_pod() -> None:
    again = {"restarts": 2, "started": after(-1), "earlier": ended(), "label_attempt": 1}
    actions = reconcile(continued(**again).with_status(restarts=Restarts()).build(), T0)
    status = written(actions)
    assert (status.attempt, deleted(actions), actions.relabels) == (2, ["Job/tune-train-0"], ())
    assert (status.attempts[-1].number, status.attempts[-1].failure) == (1, FailureClass.INTERNAL)
    # So does one whose container the kubelet has not started a second time.
    code = {"exit_code": 52, "termination_message": ended().termination_message, "finished": after(-1), "label_attempt": 1}
    actions = reconcile(continued(**code).with_status(restarts=Restarts()).build(), T0)
    assert (written(actions).attempt, deleted(actions)) == (2, ["Job/tune-train-0"])


def test_a_second_attempt_that_stalls_in_the_operators_eyes_leaves_the_pod() -> None:
    seen = continued(label_attempt=1, started=after(-700)).with_status(restarts=Restarts())
    seen = replace(seen, job=a_job().run(stallDeadlineSeconds=600))
    actions = reconcile(seen.build(), T0)
    assert (written(actions).attempt, deleted(actions), actions.relabels) == (2, ["Job/tune-train-0"], ())
    assert (written(actions).attempts[-1].failure, written(actions).attempts[-1].continued) == (FailureClass.STALLED, False)


def test_the_second_attempt_succeeds_in_its_pod() -> None:
    seen = continued(phase="Succeeded", exit_code=0, finished=after(-1), termination_message=envelope(), label_attempt=1)
    actions = reconcile(seen.batch_job("Complete", attempt=0, restarts_container=True).build(), T0)
    assert condition(actions, ConditionType.TRAINED) == ("True", "Completed")
    assert [(one.number, one.outcome) for one in written(actions).attempts] == [(0, "Failed"), (1, "Succeeded")]


def test_a_job_that_disappears_under_its_second_attempt_is_followed_by_one_of_its_own() -> None:
    seen = continued(label_attempt=1)
    second = Attempt(number=1, start_time="2026-01-01T11:59:57Z")
    seen = seen.with_status(attempts=[*seen.status.attempts, second], restarts=Restarts()).but(batch_jobs=(), pods=())
    lost = reconcile(seen.nothing_left().build(), T0)
    assert (written(lost).attempt, written(lost).attempts[-1].failure) == (2, FailureClass.INFRASTRUCTURE)
    # If nobody has seen the second one run, it runs under its own name.
    unseen = continued().but(batch_jobs=(), pods=()).nothing_left()
    assert created(reconcile(unseen.build(), T0)) == ["Job/tune-train-1"]


def test_suspending_and_cancelling_take_the_container_that_waits_with_them() -> None:
    for seen in (started_again(), continued(label_attempt=1)):
        suspended = reconcile(replace(seen, job=a_job().run(suspend=True)).build(), T0)
        assert deleted(suspended) == ["Job/tune-train-0"]
        cancelled = reconcile(replace(seen, job=a_job().run(cancel=True)).build(), T0)
        assert deleted(cancelled) == ["Job/tune-train-0"]
        assert condition(cancelled, ConditionType.FINISHED) == ("False", "Stopping")


def test_a_pod_shows_each_attempt_its_own_container() -> None:
    view = PodView("p", "u", Role.TRAIN, 3, created=T0, phase="Running", started=after(-2), restarts=1, earlier=ended())
    first, second = view.in_attempt(3), view.in_attempt(4)
    assert (first.phase, first.exit_code, first.started, first.finished) == ("Failed", 52, after(-290), after(-3))
    assert "rank 0 was killed" in first.termination_message
    assert second == view
    assert replace(view, restarts=2).in_attempt(4).phase == "Failed"
    # The end came before whatever happens to the pod now: a node that is lost meanwhile keeps nothing from being decided.
    leaving = replace(view, gone=True, deletion_requested=T0, deletion_due=T0, disruption="DeletionByTaintManager", eviction="x")
    assert leaving.in_attempt(3) == first
    # Of a container whose end nobody kept, only that it ended is known.
    assert (replace(view, earlier=None).in_attempt(3).phase, replace(view, earlier=None).in_attempt(3).exit_code) == (
        "Failed",
        None,
    )

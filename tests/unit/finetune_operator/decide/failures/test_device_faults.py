"""A condition of a node that says that a GPU of it broke: it explains what ranks could not, and nothing that came before it."""

from typing import Any

import pytest

from finetune_job.failures import FailureClass
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.failures.device_faults import nodes_in_question
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.observed import NodeConditionView, NodeView
from tests.support.builders import ObservedBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, message, written

NAMED = [{"type": "GpuXidError"}, {"type": "AcceleratedHardwareReady", "status": "False"}]


def xid(seconds: float = -20, kind: str = "GpuXidError", status: str = "True") -> NodeConditionView:
    return NodeConditionView(kind, status, "Xid79", "GPU 3 has fallen off the bus", after(seconds))


def failing(
    failure: FailureClass = FailureClass.COLLECTIVE, *conditions: NodeConditionView, named: Any = NAMED, **report: Any
) -> ObservedBuilder:
    """A gang whose second pod has failed, on nodes of which the second has these conditions."""
    job = a_job().nodes(2).with_profile(gpu={"memory": "80Gi", "faultConditions": named})
    seen = observing(job).training().pod(0, node="node-a").pod(1, node="node-b")
    ready = NodeConditionView("Ready", "True", "KubeletReady", "", after(-9_999))
    nodes = (NodeView("node-a", (ready,)), NodeView("node-b", (ready, *conditions)))
    return seen.failed_pod(1, failure, rank=1, **report).batch_job_failed().but(nodes_seen=nodes)


@pytest.mark.parametrize("seen_by_ranks", [FailureClass.COLLECTIVE, FailureClass.INTERNAL, FailureClass.STALLED])
@pytest.mark.parametrize("fault", [xid(), xid(-300), xid(kind="AcceleratedHardwareReady", status="False")])
def test_what_ranks_could_not_explain_is_the_fault_of_the_device(seen_by_ranks: FailureClass, fault: NodeConditionView) -> None:
    actions = reconcile(failing(seen_by_ranks, fault, message="a peer is silent").build(), after(25))
    status = written(actions)
    (record,) = status.attempts
    assert (record.failure, record.counted, status.restarts.counted) == (FailureClass.DEVICE_FAULT, False, 0)
    said = f"node node-b has the condition {fault.type}={fault.status}: Xid79 GPU 3 has fallen off the bus."
    assert record.message == f"{said} The ranks saw: {seen_by_ranks}: rank 1, pod tune-train-0-1: a peer is silent"
    assert record.hint == "Cordon the node that the message names, so that the next attempt runs elsewhere."
    assert [one.failure for one in record.evidence] == [seen_by_ranks]
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", Reason.BACKING_OFF)
    assert said in message(actions, ConditionType.TRAINED)


@pytest.mark.parametrize(
    ("why", "seen"),
    [
        ("it was there before the pods", failing(FailureClass.INTERNAL, xid(-301))),
        ("it is another condition", failing(FailureClass.INTERNAL, xid(kind="DiskPressure"))),
        ("it is called off", failing(FailureClass.INTERNAL, xid(status="False"))),
        ("the profile names none", failing(FailureClass.INTERNAL, xid(), named=[])),
        ("nobody knows since when", failing(FailureClass.INTERNAL, NodeConditionView("GpuXidError", "True", "", "", None))),
        ("the node has none", failing(FailureClass.INTERNAL)),
    ],
)
def test_a_condition_explains_nothing_if(why: str, seen: ObservedBuilder) -> None:
    (record,) = written(reconcile(seen.build(), after(25))).attempts
    assert (record.failure, record.counted) == (FailureClass.INTERNAL, True), why


@pytest.mark.parametrize("failure", [FailureClass.USER_DATA, FailureClass.HOST_OUT_OF_MEMORY, FailureClass.DEVICE_OUT_OF_MEMORY])
def test_what_a_rank_has_explained_stays_its_explanation(failure: FailureClass) -> None:
    (record,) = written(reconcile(failing(failure, xid()).build(), after(25))).attempts
    assert record.failure is failure


def test_only_nodes_of_a_gang_that_fails_are_looked_at_and_only_for_a_profile_that_asks() -> None:
    assert nodes_in_question(failing().build()) == ("node-a", "node-b")
    assert nodes_in_question(failing(named=[]).build()) == ()
    running = observing(a_job().nodes(2).with_profile(gpu={"memory": "80Gi", "faultConditions": NAMED})).training()
    assert nodes_in_question(running.build()) == ()
    assert nodes_in_question(running.succeeded().build()) == ()
    assert nodes_in_question(running.prepared().nothing_left().build()) == ()
    assert nodes_in_question(failing().condition(ConditionType.TRAINED, True, Reason.COMPLETED).build()) == ()
    lost = failing().but(batch_jobs=())
    assert nodes_in_question(lost.build()) == ()
    assert nodes_in_question(failing().condition(ConditionType.SUCCEEDED, False, Reason.CANCELLED).build()) == ()
    crowd = failing()
    for rank in range(2, 100):
        crowd = crowd.pod(rank, node=f"node-{rank:03d}")
    assert len(nodes_in_question(crowd.build())) == 64

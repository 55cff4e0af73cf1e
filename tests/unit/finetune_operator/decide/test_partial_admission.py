"""A queue that admits a part of a gang: its pods are told how many they are, and never the number of an earlier admission."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_job.api.status import Attempt, ProgressStatus
from finetune_job.progress import Progress
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.children_seen import GangNodesView, RefusedWrite
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.times import timestamp
from finetune_operator.decide.train_stage import queue_of_growth
from tests.support.builders import T0, JobBuilder, ObservedBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

MIN, EQUAL = "kueue.x-k8s.io/job-min-parallelism", "kueue.x-k8s.io/job-completions-equal-parallelism"
WAITS = {"shrinkAfterSeconds": 120, "growAfterSeconds": 600}
TOLD = Progress(attempt=0, step=50, total_steps=900, checkpoint_step=50, seconds_left=5_000)


def queued(fewest: int = 2) -> JobBuilder:
    job = a_job().nodes(4).processes_per_node(2).spec("training.reduction", "Ordered")
    job = job.spec("parallelism.elastic.minNodes", fewest).run(queueName="gpus")
    return job.with_profile(elastic=WAITS)


def told(nodes: int, attempt: int = 0) -> GangNodesView:
    return GangNodesView("tune-nodes", "uid-nodes", attempt, nodes)


def admitted(nodes: int, known: GangNodesView | None = None, **job: Any) -> ObservedBuilder:
    """A gang of which a queue has let so many pods go; none of them runs yet."""
    seen = observing(queued()).prepared().but(service_exists=True, gang_nodes=known)
    seen = seen.batch_job(parallelism=nodes, takes_fewer=True, **job)
    for rank in range(nodes):
        seen = seen.pod(rank, phase="Pending")
    return seen


def running(nodes: int, known: GangNodesView | None = None, *records: Attempt) -> ObservedBuilder:
    """The same, and all of them run."""
    seen = admitted(nodes, known or told(nodes)).with_status(attempts=list(records))
    for rank in range(nodes):
        seen = seen.pod(rank, phase="Running", started=after(-290))
    return seen


def config_map(actions: Actions) -> dict[str, Any]:
    (found,) = [dict(one.body) for one in actions.creates if one.kind == "ConfigMap"]
    return found


def train_job_of(actions: Actions) -> dict[str, Any]:
    (found,) = [dict(one.body) for one in actions.creates if one.kind == "Job"]
    return found


@pytest.mark.parametrize(("asked", "fewest"), [(None, "2"), (3, "2"), (2, None)])
def test_a_queue_may_admit_fewer_down_to_the_fewest(asked: int | None, fewest: str | None) -> None:
    seen = observing(queued()).prepared().attempt(1).with_status(gang_nodes=asked).nothing_left()
    job = train_job_of(reconcile(seen.build(), T0))
    annotations = job["metadata"]["annotations"]
    assert (annotations.get(MIN), annotations.get(EQUAL)) == (fewest, "true" if fewest else None)
    container = job["spec"]["template"]["spec"]["containers"][0]
    number = container["args"][container["args"].index("--nodes") + 1]
    variables = {one["name"]: one for one in container["env"]}
    if fewest is None:
        assert (number, "GANG_NODES" in variables) == ("2", False)
    else:
        source = {"configMapKeyRef": {"name": "tune-nodes", "key": "attempt-1"}}
        assert (number, variables["GANG_NODES"]["valueFrom"]) == ("$(GANG_NODES)", source)


def test_without_a_queue_and_without_elasticity_nothing_is_left_to_decide() -> None:
    free = a_job().nodes(4).spec("training.reduction", "Ordered").spec("parallelism.elastic.minNodes", 2)
    fixed = a_job().nodes(4).run(queueName="gpus")
    for job in (free, fixed):
        annotations = train_job_of(reconcile(observing(job).prepared().build(), T0))["metadata"]["annotations"]
        assert (MIN in annotations, EQUAL in annotations) == (False, False)


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_the_pods_are_told_how_many_were_admitted(nodes: int) -> None:
    made = config_map(reconcile(admitted(nodes).build(), T0))
    assert (made["metadata"]["name"], made["data"], made["immutable"]) == ("tune-nodes", {"attempt-0": str(nodes)}, True)
    assert made["metadata"]["ownerReferences"][0]["controller"] is True


def test_nothing_is_told_before_the_queue_has_decided_nor_twice() -> None:
    for seen in (admitted(4, suspended=True), admitted(3, told(3))):
        actions = reconcile(seen.build(), T0)
        assert (created(actions), deleted(actions)) == ([], [])


def test_a_job_that_takes_no_fewer_keeps_the_number_in_its_arguments() -> None:
    seen = observing(queued()).training().batch_job(attempt=0, parallelism=3)
    actions = reconcile(seen.build(), T0)
    assert created(actions) == []
    assert message(actions, ConditionType.TRAINED) == "Attempt 0 runs on 4 of 4 nodes."
    record = seen.status.attempts[0]
    assert (record.nodes, [one.message for one in actions.events]) == (None, [])


@pytest.mark.parametrize(
    "seen", [admitted(4, told(2), suspended=True), admitted(2, told(2, attempt=7)), admitted(2, told(0, attempt=-1))]
)
def test_a_number_of_before_is_taken_away(seen: ObservedBuilder) -> None:
    actions = reconcile(seen.build(), T0)
    assert (created(actions), deleted(actions)) == ([], ["ConfigMap/tune-nodes"])
    assert actions.requeue_after_seconds == 1.0


def test_pods_that_may_have_read_another_number_are_not_left_to_wait_for_each_other() -> None:
    record = Attempt(number=0, start_time=timestamp(after(-700)), running_time=timestamp(after(-650)), nodes=2, ranks=4)
    actions = reconcile(running(3, told(2), record).build(), T0)
    status = written(actions)
    assert sorted(deleted(actions)) == ["ConfigMap/tune-nodes", "Job/tune-train-0"]
    assert (status.attempt, status.gang_nodes, status.attempts[0].outcome) == (1, 3, "Resized")
    assert (status.attempts[0].counted, status.restarts.counted, status.restarts.uncounted) == (False, 0, 0)
    assert status.attempts[0].message == "The queue has admitted 3 pods of an attempt that began with 2."


@pytest.mark.parametrize(("parallelism", "nodes"), [(0, 2), (1, 2), (99, 4)])
def test_whatever_stands_in_the_job_the_gang_keeps_within_its_bounds(parallelism: int, nodes: int) -> None:
    seen = observing(queued()).prepared().but(service_exists=True).batch_job(parallelism=parallelism, takes_fewer=True)
    assert config_map(reconcile(seen.build(), T0))["data"] == {"attempt-0": str(nodes)}


def test_a_job_whose_size_cannot_be_read_has_the_size_that_was_asked_for() -> None:
    seen = observing(queued()).prepared().but(service_exists=True).with_status(gang_nodes=3)
    assert config_map(reconcile(seen.batch_job(parallelism=None, takes_fewer=True).build(), T0))["data"] == {"attempt-0": "3"}


@pytest.mark.parametrize("known", [None, told(1), told(0, attempt=-1)])
def test_a_gang_of_fixed_size_follows_no_annotation_that_somebody_has_written(known: GangNodesView | None) -> None:
    fixed = observing(a_job().nodes(4).run(queueName="gpus")).training().but(gang_nodes=known)
    actions = reconcile(fixed.batch_job(parallelism=2, takes_fewer=True).build(), T0)
    assert (created(actions), deleted(actions)) == ([], [])
    assert actions.status is None or (actions.status.attempt, actions.status.gang_nodes) == (0, None)


def test_a_refusal_of_the_number_is_said_and_not_asked_for_at_once_again() -> None:
    refusal = RefusedWrite("ConfigMap", "tune-nodes", 403, "exceeded quota: objects", T0, 1, after(30))
    actions = reconcile(admitted(3).but(refused_write=refusal).build(), T0)
    assert created(actions) == []
    assert condition(actions, ConditionType.READY) == ("False", Reason.CREATE_REFUSED)
    assert "Its pods wait for the ConfigMap with their number." in message(actions, ConditionType.TRAINED)


@pytest.mark.parametrize(("overdue", "ends"), [(-29, False), (30, True)])
def test_a_part_does_not_start_while_a_pod_of_before_can_run(overdue: float, ends: bool) -> None:
    left = {"phase": "Running", "started": after(-900), "deletion_requested": after(-400), "deletion_due": after(-overdue)}
    seen = admitted(2).pod(3, node="node-b", **left)
    actions = reconcile(seen.build(), T0)
    said = "tune-train-0-3 on node node-b is still to end, from before the queue took the Job back."
    assert created(actions) == []
    if not ends:
        assert (deleted(actions), message(actions, ConditionType.TRAINED)) == ([], said)
        assert condition(actions, ConditionType.READY) == ("False", Reason.WAITING_FOR_PODS)
        assert actions.requeue_after_seconds == 30 - overdue
        return
    status = written(actions)
    assert (deleted(actions), status.attempt, status.gang_nodes) == (["Job/tune-train-0"], 1, 2)
    assert (status.attempts[0].outcome, status.attempts[0].message) == ("Resized", said)
    ended = seen.pod(3, phase="Failed", exit_code=143)
    assert config_map(reconcile(ended.build(), T0))["data"] == {"attempt-0": "2"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('configmap "tune-nodes" not found', Reason.WAITING_FOR_PODS),
        ("couldn't find key attempt-0 in ConfigMap team/tune-nodes", Reason.WAITING_FOR_PODS),
        ('secret "mine" not found', Reason.MOUNT_FAILED),
    ],
)
def test_that_pods_wait_for_their_number_is_no_trouble(said: str, reason: Reason) -> None:
    seen = admitted(2, told(2)).pod(1, waiting_reason="CreateContainerConfigError", waiting_message=said)
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.READY) == ("False", reason)
    assert [one.type for one in actions.events] == ([] if reason is Reason.WAITING_FOR_PODS else ["Warning"])


def test_that_one_pod_waits_for_its_number_hides_no_trouble_of_another() -> None:
    seen = admitted(2, told(2))
    for rank, said in enumerate(('configmap "tune-nodes" not found', 'secret "mine" not found')):
        seen = seen.pod(rank, waiting_reason="CreateContainerConfigError", waiting_message=said)
    assert condition(reconcile(seen.build(), T0), ConditionType.READY) == ("False", Reason.MOUNT_FAILED)


def test_a_volume_that_cannot_be_mounted_is_told_if_no_pod_waits_for_its_number() -> None:
    seen = admitted(2, told(2)).pod(0, waiting_reason="ContainerCreating", events=("FailedMount: no such claim",))
    assert condition(reconcile(seen.build(), T0), ConditionType.READY) == ("False", Reason.MOUNT_FAILED)


def test_a_part_that_runs_is_the_size_of_the_attempt() -> None:
    actions = reconcile(running(3).build(), T0)
    status = written(actions)
    assert (status.gang_nodes, status.attempts[0].nodes, status.attempts[0].ranks) == (3, 3, 6)
    assert message(actions, ConditionType.TRAINED) == "Attempt 0 runs on 3 of 4 nodes."
    assert condition(actions, ConditionType.READY) == ("True", Reason.RUNNING)


def test_a_job_that_comes_back_with_another_part_stays_the_same_attempt() -> None:
    record = Attempt(number=0, start_time=timestamp(after(-700)), nodes=4, ranks=8, interruptions=1)
    actions = reconcile(running(2, told(2), record).build(), T0)
    status = written(actions)
    (after_it,) = status.attempts
    assert (status.attempt, status.gang_nodes) == (0, 2)
    assert (after_it.nodes, after_it.ranks, after_it.interruptions, after_it.outcome) == (2, 4, 1, record.outcome)
    assert [(one.type, one.message) for one in actions.events] == [("Normal", "Attempt 0 continues on 2 of 4 nodes, 4 before.")]
    seen = running(2, told(2), after_it).with_status(gang_nodes=2)
    assert [one.message for one in reconcile(seen.build(), T0).events] == []


def test_what_told_the_pods_goes_with_the_training() -> None:
    seen = observing(queued()).prepared().but(service_exists=True, gang_nodes=told(4)).succeeded()
    assert deleted(reconcile(seen.build(), T0)) == ["ConfigMap/tune-nodes"]


def test_what_is_left_of_it_goes_with_the_other_children_at_the_end() -> None:
    seen = observing(queued().run(cancel=True, ttlSecondsAfterFinished=60)).training().but(gang_nodes=told(4))
    ended = reconcile(seen.nothing_left().build(), T0).status
    assert ended is not None
    finished = replace(seen, status=ended, batch_jobs=(), pods=()).nothing_left()
    done = reconcile(finished.build(), T0).status or ended
    later = reconcile(replace(finished, status=done).build(), after(61))
    assert {"ConfigMap/tune-plan", "ConfigMap/tune-nodes"} <= set(deleted(later))


# Growth.


def growing(
    waiting: int | None, *, known: int | None = 40, nodes: int = 2, attempts: tuple[Attempt, ...] = ()
) -> ObservedBuilder:
    """A part of a gang that has trained for 650 s and has just saved."""
    running_now = Attempt(number=0, start_time=timestamp(after(-700)), running_time=timestamp(after(-650)), nodes=nodes, ranks=4)
    progress = ProgressStatus(step=45, total_steps=900, checkpoint_step=known)
    seen = running(nodes, told(nodes)).with_status(attempts=[*attempts, running_now], gang_nodes=nodes, progress=progress)
    return replace(seen, progress=TOLD, waiting_in_queue=waiting)


@pytest.mark.parametrize(("waiting", "grows"), [(0, True), (1, False), (None, False)])
def test_a_gang_asks_its_queue_for_more_only_if_nobody_waits_there(waiting: int | None, grows: bool) -> None:
    actions = reconcile(growing(waiting).build(), T0)
    if not grows:
        assert deleted(actions) == []
        return
    status = written(actions)
    assert (status.attempt, status.gang_nodes, status.attempts[-1].outcome) == (1, 4, "Resized")
    assert deleted(actions) == ["Job/tune-train-0"]


@pytest.mark.parametrize(
    ("why", "seen", "queue"),
    [
        ("it may grow", growing(None), "gpus"),
        ("it has no new checkpoint", growing(None, known=50), None),
        ("it has all nodes", growing(None, nodes=4), None),
        ("it has told nothing", replace(growing(None), progress=None), None),
        ("its size is not known", growing(None).with_status(gang_nodes=None), None),
        ("its plan is lost", replace(growing(None), plan_json="{}"), None),
        ("training is over", replace(growing(None).condition(ConditionType.TRAINED, True, Reason.COMPLETED)), None),
    ],
)
def test_the_queue_is_looked_at_only_if_the_answer_matters(why: str, seen: ObservedBuilder, queue: str | None) -> None:
    assert queue_of_growth(seen.build(), T0) == queue, why


def test_no_queue_is_looked_at_for_a_gang_without_one() -> None:
    free = a_job().nodes(4).processes_per_node(2).spec("training.reduction", "Ordered").spec("parallelism.elastic.minNodes", 2)
    seen = growing(None).build()
    job = observing(free.with_profile(elastic=WAITS)).prepared()
    other = replace(job, status=seen.job.status.model_copy(update={"plan": job.status.plan}), progress=TOLD)
    assert queue_of_growth(other.build(), T0) is None


def test_a_try_after_which_the_queue_gave_no_more_doubles_the_wait() -> None:
    before = Attempt(number=-1, outcome="Resized", running_time=timestamp(after(-5000)), nodes=2, ranks=4)
    assert deleted(reconcile(growing(0, attempts=(before,)).build(), after(1200 - 650 - 1))) == []
    assert deleted(reconcile(growing(0, attempts=(before,)).build(), after(1200 - 650))) == ["Job/tune-train-0"]


def test_a_try_after_which_the_queue_gave_more_doubles_nothing() -> None:
    before = Attempt(number=-1, outcome="Resized", running_time=timestamp(after(-5000)), nodes=1, ranks=2)
    assert deleted(reconcile(growing(0, attempts=(before,)).build(), T0)) == ["Job/tune-train-0"]

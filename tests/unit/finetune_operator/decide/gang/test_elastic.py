"""Elastic gangs: what size an attempt has, and why it ends to have another one."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from finetune_job.api.status import Attempt, ProgressStatus
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.progress import Progress
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.gang.elastic import elasticity, nodes_after_failure
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import JobConditionView, PodView
from finetune_operator.decide.seen.times import timestamp
from finetune_operator.decide.stages.train_stage import queue_of_growth
from tests.support.builders import T0, JobBuilder, ObservedBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

WAITS = {"shrinkAfterSeconds": 120, "growAfterSeconds": 600}


def elastic(nodes: int = 4, fewest: int = 2, **profile: Any) -> JobBuilder:
    job = (
        a_job()
        .nodes(nodes)
        .processes_per_node(2)
        .spec("training.reduction", "Ordered")
        .spec("parallelism.elastic.minNodes", fewest)
    )
    return job.with_profile(elastic=WAITS, **profile)


def waiting(seen: ObservedBuilder, placed: int, seconds: float) -> ObservedBuilder:
    """A gang whose Job is so old, and of whose pods so many have a node."""
    seen = seen.prepared().but(service_exists=True).batch_job(created=after(-seconds), start_time=after(-seconds))
    for rank in range(seen.job.parse().spec.parallelism.nodes):
        if rank < placed:
            seen = seen.pod(rank, scheduled=after(-seconds + 1))
        else:
            seen = seen.pod(rank, unschedulable="0/9 nodes are available: 9 Insufficient nvidia.com/gpu.")
    return seen


@pytest.mark.parametrize(
    ("placed", "seconds", "nodes"), [(3, 120, 3), (2, 121, 2), (3, 119, None), (1, 9_999, None), (0, 9_999, None)]
)
def test_a_gang_starts_on_the_nodes_that_came_in_time_if_they_are_enough(placed: int, seconds: float, nodes: int | None) -> None:
    actions = reconcile(waiting(observing(elastic()), placed, seconds).build(), T0)
    if nodes is None:
        assert deleted(actions) == []
        assert condition(actions, ConditionType.READY) == ("False", Reason.UNSCHEDULABLE)
        return
    status = written(actions)
    (record,) = status.attempts
    assert (status.attempt, status.gang_nodes, status.restarts.uncounted) == (1, nodes, 0)
    assert (record.outcome, record.nodes, record.ranks, record.counted, record.failure) == ("Resized", 4, 8, False, None)
    assert record.message == f"{nodes} of 4 pods had a node within 120 s."
    assert (deleted(actions), created(actions)) == (["Job/tune-train-0"], [])
    assert (status.phase, condition(actions, ConditionType.TRAINED)) == ("Restarting", ("Unknown", Reason.RESIZING))


def test_a_pod_that_is_being_deleted_has_not_come() -> None:
    seen = waiting(observing(elastic()), 3, 500).pod(0, deletion_requested=after(-5), deletion_due=after(25))
    assert written(reconcile(seen.build(), T0)).gang_nodes == 2


def test_a_gang_that_waits_is_looked_at_again_when_its_wait_is_over() -> None:
    assert reconcile(waiting(observing(elastic()), 3, 100).build(), T0).requeue_after_seconds == 20


def test_a_gang_of_fixed_size_waits_for_all_of_its_nodes() -> None:
    fixed = a_job().nodes(4).with_profile(elastic=WAITS)
    assert deleted(reconcile(waiting(observing(fixed), 3, 9_999).build(), T0)) == []


def test_pods_that_cannot_start_for_another_cause_are_not_given_up_for_a_smaller_gang() -> None:
    seen = waiting(observing(elastic()), 3, 500).pod(0, waiting_reason="ImagePullBackOff")
    assert deleted(reconcile(seen.build(), T0)) == []


@pytest.mark.parametrize(("asked", "pods"), [(3, 3), (None, 4), (1, 2), (99, 4)])
def test_the_next_attempt_has_the_size_of_the_status_within_its_bounds(asked: int | None, pods: int) -> None:
    seen = observing(elastic()).prepared().attempt(1).with_status(gang_nodes=asked).nothing_left()
    job = next(one.body for one in reconcile(seen.build(), T0).creates if one.kind == "Job")
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (pods, pods)
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--nodes") + 1] == str(pods)


TAKEN, KEPT = {"disruption": "DeletionByTaintManager"}, {}


@pytest.mark.parametrize(
    ("nodes", "pods", "after_it"),
    [
        (4, [TAKEN, KEPT, KEPT, KEPT], 3),
        (4, [TAKEN, TAKEN, TAKEN, KEPT], 2),
        (4, [KEPT, KEPT, KEPT, KEPT], 4),
        (3, [{"disruption": "TerminationByKubelet"}, KEPT, KEPT], 2),
        (2, [TAKEN, TAKEN], 4),
    ],
)
def test_what_was_lost_or_taken_back_is_not_waited_for(nodes: int, pods: list[dict[str, str]], after_it: int) -> None:
    gang = [PodView(f"p{rank}", f"u{rank}", Role.TRAIN, 0, T0, node_rank=rank, **one) for rank, one in enumerate(pods)]
    limits = elasticity(elastic().plan())
    assert limits is not None
    assert nodes_after_failure(limits, nodes, gang) == after_it


def test_a_reclaimed_node_costs_no_restart_and_no_wait() -> None:
    seen = observing(elastic()).training()
    seen = seen.failed_pod(3, FailureClass.PREEMPTED, step=7).pod(3, disruption="TerminationByKubelet")
    actions = reconcile(seen.batch_job_failed("PodFailurePolicy").build(), T0)
    status = written(actions)
    assert (status.attempt, status.gang_nodes, status.restarts.counted) == (1, 3, 0)
    (record,) = status.attempts
    assert (record.outcome, record.counted, record.nodes, record.ranks) == ("Failed", False, 4, 8)
    assert message(actions, ConditionType.TRAINED).endswith("Attempt 1 has 3 of 4 nodes.")


# Growth.

SMALL = Attempt(number=1, start_time=timestamp(after(-700)), running_time=timestamp(after(-650)), nodes=2, ranks=4)
NEVER_RAN = Attempt(number=0, outcome="Resized", start_time=timestamp(after(-900)), nodes=4, ranks=8)
TOLD = Progress(attempt=1, step=50, total_steps=900, checkpoint_step=50, seconds_left=5_000)


def growing(
    job: JobBuilder | None = None,
    *,
    told: Progress | None = TOLD,
    attempts: tuple[Attempt, ...] = (SMALL,),
    known: int | None = 40,
    nodes: int = 2,
) -> ObservedBuilder:
    """A gang of so many nodes that has trained for 650 s."""
    seen = observing(job or elastic()).training(attempt=1)
    progress = ProgressStatus(step=45, total_steps=900, checkpoint_step=known)
    seen = seen.with_status(attempts=list(attempts), gang_nodes=nodes, progress=progress).but(progress=told)
    return replace(seen, pods=tuple(pod for pod in seen.pods if pod.node_rank < nodes))


def test_a_smaller_gang_asks_for_all_nodes_once_it_has_saved() -> None:
    actions = reconcile(growing().build(), T0)
    status = written(actions)
    assert (status.attempt, status.gang_nodes) == (2, 4)
    assert (status.attempts[-1].outcome, status.attempts[-1].nodes, status.attempts[-1].counted) == ("Resized", 2, False)
    assert deleted(actions) == ["Job/tune-train-1"]
    assert status.restarts.uncounted == 0


FAILED = Attempt(number=0, outcome="Failed", failure=FailureClass.NODE_LOST, running_time=timestamp(after(-5000)), nodes=3)
GROWN = Attempt(number=0, outcome="Resized", running_time=timestamp(after(-5000)), nodes=2)


@pytest.mark.parametrize(
    ("why", "seen", "now"),
    [
        ("it has no new checkpoint", growing(known=50), T0),
        ("nobody knows of an earlier checkpoint", growing(known=None), T0),
        ("it has told nothing", growing(told=None), T0),
        ("it has not saved", growing(told=TOLD.model_copy(update={"checkpoint_step": None})), T0),
        ("another attempt has told it", growing(told=TOLD.model_copy(update={"attempt": 0})), T0),
        ("it has not trained for long", growing(), after(-60)),
        ("it is nearly done", growing(told=TOLD.model_copy(update={"seconds_left": 500.0})), T0),
        ("all nodes could not be had before", growing(attempts=(NEVER_RAN, SMALL)), T0),
        ("it has all nodes", growing(nodes=4), T0),
        ("nothing is recorded", growing(attempts=()), T0),
        ("status has no progress", growing().with_status(progress=None), T0),
        ("when it began cannot be read", growing(attempts=(SMALL.model_copy(update={"running_time": "soon"}),)), T0),
        ("its attempt is not recorded yet", growing(attempts=(SMALL.model_copy(update={"number": 0}),)), T0),
        ("a queue gave it what it has", growing(elastic(pods={"train": {"queueName": "gpus"}})), T0),
    ],
)
def test_a_gang_does_not_ask_for_more_if(why: str, seen: ObservedBuilder, now: datetime) -> None:
    actions = reconcile(seen.build(), now)
    assert deleted(actions) == [], why


@pytest.mark.parametrize(
    ("why", "seen"),
    [
        ("it does not know when it will be done", growing(told=TOLD.model_copy(update={"seconds_left": None}))),
        ("it will be done after just as long", growing(told=TOLD.model_copy(update={"seconds_left": 600.0}))),
        (
            "when its pods ran is not known, and it began long ago",
            growing(attempts=(SMALL.model_copy(update={"running_time": ""}),)),
        ),
        ("an attempt has failed since nodes could not be had", growing(attempts=(NEVER_RAN, FAILED, SMALL))),
    ],
)
def test_a_gang_asks_for_more_although(why: str, seen: ObservedBuilder) -> None:
    assert deleted(reconcile(seen.build(), T0)) == ["Job/tune-train-1"], why


@pytest.mark.parametrize(("tries", "seconds"), [(1, 1200), (2, 2400), (3, 4800), (5, 4800)])
def test_each_time_that_nodes_could_not_be_had_the_next_try_is_later(tries: int, seconds: int) -> None:
    before = [one for _ in range(tries) for one in (GROWN, NEVER_RAN)]
    attempts = (*(one.model_copy(update={"number": -number}) for number, one in enumerate(before)), SMALL)
    told = TOLD.model_copy(update={"seconds_left": 50_000.0})
    due = seconds - 650
    assert deleted(reconcile(growing(told=told, attempts=attempts).build(), after(due - 1))) == []
    assert deleted(reconcile(growing(told=told, attempts=attempts).build(), after(due))) == ["Job/tune-train-1"]


def test_a_job_that_was_suspended_asks_for_all_nodes_again() -> None:
    seen = growing(elastic().run(suspend=True))
    assert written(reconcile(seen.build(), T0)).gang_nodes is None


def test_the_size_of_a_gang_that_is_done_stays_in_status_when_a_later_role_is_suspended() -> None:
    seen = observing(elastic().run(suspend=True)).trained().with_status(gang_nodes=2).batch_job().running()
    assert written(reconcile(seen.build(), T0)).gang_nodes == 2


def test_a_running_gang_says_on_how_many_nodes_and_its_attempt_keeps_the_world_size() -> None:
    seen = growing(told=None, attempts=())
    actions = reconcile(seen.build(), T0)
    assert message(actions, ConditionType.TRAINED) == "Attempt 1 runs on 2 of 4 nodes."
    (record,) = written(actions).attempts
    assert (record.nodes, record.ranks) == (2, 4)


# Queues.


def queued(fewest: int = 2) -> JobBuilder:
    return elastic(fewest=fewest).run(queueName="gpus")


def held_back(seconds: float, *attempts: Attempt, nodes: int | None = None, fewest: int = 2, **job: Any) -> ObservedBuilder:
    """A gang whose Job was created so long ago and waits in its queue."""
    seen = observing(queued(fewest)).prepared().attempt(1).with_status(attempts=list(attempts), gang_nodes=nodes)
    return seen.but(service_exists=True).batch_job(suspended=True, start_time=None, created=after(-seconds), **job)


def suspended_for(seconds: float) -> tuple[JobConditionView, ...]:
    return (JobConditionView("Suspended", since=after(-seconds)),)


PREEMPTED = SMALL.model_copy(update={"nodes": 4, "ranks": 8, "interruptions": 1})
GREW = Attempt(number=0, outcome="Resized", running_time=timestamp(after(-5000)), nodes=3)


@pytest.mark.parametrize(
    ("why", "seen", "nodes"),
    [
        ("it has waited for long enough", held_back(120), 2),
        ("it has not", held_back(119), None),
        ("half are fewer than it needs", held_back(120, fewest=3), 3),
        ("it asks for the fewest already", held_back(9_999, nodes=2), None),
        ("it ran on all of them before", held_back(120, PREEMPTED), 2),
        ("it gave nodes back to ask for more", held_back(120, GREW), 3),
        ("those that it had before are not to be had either", held_back(120, GREW, NEVER_RAN, nodes=3, fewest=1), 1),
        ("it was preempted just now", held_back(9_999, conditions=suspended_for(119)), None),
        ("it was preempted long ago", held_back(9_999, conditions=suspended_for(120)), 2),
    ],
)
def test_a_gang_that_its_queue_does_not_admit_asks_for_fewer_nodes(why: str, seen: ObservedBuilder, nodes: int | None) -> None:
    actions = reconcile(seen.build(), T0)
    if nodes is None:
        assert deleted(actions) == [], why
        return
    status = written(actions)
    assert (deleted(actions), status.attempt, status.gang_nodes) == (["Job/tune-train-1"], 2, nodes), why
    assert (status.attempts[-1].outcome, status.restarts.counted, status.restarts.uncounted) == ("Resized", 0, 0)


@pytest.mark.parametrize(("seconds", "is_resized"), [(119, False), (120, True)])
def test_the_time_in_the_queue_before_preflight_was_done_does_not_count(seconds: float, is_resized: bool) -> None:
    prepared = after(-600)
    actions = reconcile(held_back(9_999).build(), prepared + timedelta(seconds=seconds))
    assert (deleted(actions) == ["Job/tune-train-1"]) is is_resized
    assert is_resized or actions.requeue_after_seconds == 1.0


@pytest.mark.parametrize("job", [elastic().run(queueName="gpus"), elastic()])
def test_a_job_asks_its_queue_for_all_pods_of_the_attempt(job: JobBuilder) -> None:
    (body,) = [one.body for one in reconcile(observing(job).prepared().build(), T0).creates if one.kind == "Job"]
    arguments = body["spec"]["template"]["spec"]["containers"][0]["args"]
    assert (body["spec"]["parallelism"], arguments[arguments.index("--nodes") + 1]) == (4, "4")
    assert not [name for name in body["metadata"]["annotations"] if name.startswith("kueue")]


@pytest.mark.parametrize(("waiting_in_queue", "grows"), [(0, True), (1, False), (None, False)])
def test_a_gang_asks_its_queue_for_more_only_if_nobody_waits_there(waiting_in_queue: int | None, grows: bool) -> None:
    actions = reconcile(growing(queued()).but(waiting_in_queue=waiting_in_queue).build(), T0)
    assert deleted(actions) == (["Job/tune-train-1"] if grows else [])
    assert not grows or written(actions).gang_nodes == 4


@pytest.mark.parametrize(
    ("why", "seen", "queue"),
    [
        ("it may grow", growing(queued()), "gpus"),
        ("it has no new checkpoint", growing(queued(), known=50), None),
        ("it has all nodes", growing(queued(), nodes=4), None),
        ("it has told nothing", growing(queued(), told=None), None),
        ("its size is not known", growing(queued()).with_status(gang_nodes=None), None),
        ("its plan is lost", replace(growing(queued()), plan_json="{}"), None),
        ("training is over", growing(queued()).condition(ConditionType.TRAINED, True, Reason.COMPLETED), None),
        ("it has no queue", growing(), None),
    ],
)
def test_the_queue_is_looked_at_only_if_the_answer_matters(why: str, seen: ObservedBuilder, queue: str | None) -> None:
    assert queue_of_growth(seen.build(), T0) == queue, why

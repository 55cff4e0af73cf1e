"""Whatever happens in whatever order, and wherever the operator is killed: the invariants of `SimulatedCluster` hold, and the job
comes to rest. A walk is a list of numbers, each choosing one event, so that a failing one shrinks to the few that matter."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_job.conditions import is_condition_true
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType
from finetune_operator.decide.stage import is_terminal
from tests.support.builders import JobBuilder, a_job
from tests.support.examples import examples
from tests.support.simulated_cluster import SimulatedCluster

FAILURES = [
    FailureClass.INTERNAL,
    FailureClass.COLLECTIVE,
    FailureClass.PREEMPTED,
    FailureClass.NON_FINITE,
    FailureClass.DEVICE_OUT_OF_MEMORY,
    FailureClass.CHECKPOINT_INVALID,
    FailureClass.USER_DATA,
    FailureClass.STALLED,
    FailureClass.SOURCE_UNAVAILABLE,
    FailureClass.DESTINATION_REFUSED,
    FailureClass.DESTINATION_UNAVAILABLE,
]
Event = Callable[[SimulatedCluster, int], object]
WEIGHTED_EVENTS: list[tuple[int, Event]] = [
    (6, lambda cluster, n: (cluster.catch_up(), cluster.reconcile_once())),
    (3, lambda cluster, n: cluster.reconcile_once()),
    (2, lambda cluster, n: cluster.reconcile_once(die_after=n % 3)),
    (2, lambda cluster, n: cluster.catch_up(1 + n % 3)),
    (4, lambda cluster, n: cluster.start_pods()),
    (2, lambda cluster, n: cluster.succeed_all()),
    (1, lambda cluster, n: cluster.end_pod(n, None)),
    (1, lambda cluster, n: cluster.end_pod(n, FAILURES[n % len(FAILURES)])),
    (4, lambda cluster, n: cluster.job_controller()),
    (4, lambda cluster, n: cluster.finish_deletions(with_evidence=n % 2 == 0)),
    (1, lambda cluster, n: cluster.ask_to_delete_pod(n, "EvictionByEvictionAPI" if n % 2 else "")),
    (1, lambda cluster, n: n % 4 == 0 and cluster.children.batch_jobs and cluster.delete_job(cluster.children.batch_jobs[-1])),
    (1, lambda cluster, n: cluster.edit(cluster.job.run(suspend=n % 4 == 0))),
    (1, lambda cluster, n: cluster.edit(cluster.job.run(retry=n % 5))),
    (1, lambda cluster, n: n % 60 == 0 and cluster.edit(cluster.job.run(cancel=True))),
    (1, lambda cluster, n: cluster.pass_time(n % 500)),
]
EVENTS = [event for weight, event in WEIGHTED_EVENTS for _ in range(weight)]


def walk(cluster: SimulatedCluster, numbers: list[int]) -> None:
    for number in numbers:
        EVENTS[number % len(EVENTS)](cluster, number // len(EVENTS))


def come_to_rest(cluster: SimulatedCluster) -> None:
    """Everything goes well from here on, and a human resumes and retries; then the time to live passes."""
    cluster.edit(cluster.job.run(suspend=False))
    cluster.settle()
    cluster.edit(cluster.job.run(retry=1000))
    cluster.settle()
    assert is_terminal(cluster.status)
    assert all(pod.is_terminal for pod in cluster.children.pods), "nothing runs after the end"
    again = cluster.reconcile_once()
    assert (again.status, again.creates, again.deletes) == (None, (), ())
    cluster.pass_time(7200)
    for _ in range(3):
        cluster.reconcile_once()
        cluster.finish_deletions(with_evidence=False)
        cluster.catch_up()
    assert (cluster.children.batch_jobs, cluster.children.plan, cluster.children.service_exists) == ((), None, False)


def a_cluster(nodes: int) -> SimulatedCluster:
    """The larger gang has its data and its results elsewhere, so its walks begin with a fetch and end with a publication."""
    job = a_job().nodes(nodes).run(maxRestarts=2, ttlSecondsAfterFinished=3600)
    return SimulatedCluster(with_everything_elsewhere(job) if nodes > 1 else job)


def with_everything_elsewhere(job: JobBuilder) -> JobBuilder:
    return job.spec("data.source", "s3://bucket/train.jsonl").spec("output.destination", "oci://registry.example/team/tuned:v1")


@settings(max_examples=examples(90, 400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(numbers=st.lists(st.integers(0, 100 * len(EVENTS)), max_size=150), nodes=st.sampled_from([1, 3]))
def test_every_walk_keeps_the_invariants_and_comes_to_rest(numbers: list[int], nodes: int) -> None:
    cluster = a_cluster(nodes)
    walk(cluster, numbers)
    come_to_rest(cluster)


def test_long_walks_reach_every_end() -> None:
    ends: Counter[str] = Counter()
    attempts = publications = 0
    for seed in range(examples(70, 400)):
        numbers = random.Random(seed)
        cluster = a_cluster(nodes=1 + 2 * (seed % 2))
        walk(cluster, [numbers.randrange(100 * len(EVENTS)) for _ in range(300)])
        come_to_rest(cluster)
        ends[cluster.status.phase] += 1
        attempts = max(attempts, cluster.status.attempt)
        publications = max(publications, cluster.status.publish_attempt)
    assert set(ends) == {"Succeeded", "Failed", "Cancelled"}
    assert min(ends.values()) >= 3, ends
    assert attempts >= 4
    assert publications >= 2


def test_an_undisturbed_job_succeeds_with_one_job_per_role() -> None:
    cluster = SimulatedCluster(a_job().nodes(3))
    cluster.settle()
    assert is_condition_true(cluster.status.conditions, ConditionType.SUCCEEDED)
    jobs = [name for kind, name in cluster.created if kind == "Job"]
    assert jobs == [f"tune-{role}-0" for role in (Role.PREFLIGHT, Role.TRAIN, Role.MERGE)]


def test_a_job_with_everything_elsewhere_fetches_first_and_publishes_last() -> None:
    cluster = SimulatedCluster(with_everything_elsewhere(a_job()))
    cluster.settle()
    assert is_condition_true(cluster.status.conditions, ConditionType.SUCCEEDED)
    jobs = [name for kind, name in cluster.created if kind == "Job"]
    assert jobs == [f"tune-{role}-0" for role in Role]


def test_a_job_with_a_workspace_template_makes_its_claim_before_any_pod() -> None:
    job = a_job().spec("workspace", {"volumeClaimTemplate": {"storage": "1Gi"}})
    cluster = SimulatedCluster(job)
    cluster.settle()
    assert is_condition_true(cluster.status.conditions, ConditionType.SUCCEEDED)
    kinds = [kind for kind, _ in cluster.created]
    assert kinds.index("PersistentVolumeClaim") < kinds.index("Job")


def test_an_operator_that_dies_after_every_single_effect_gets_there_too() -> None:
    cluster = SimulatedCluster(a_job().nodes(2))
    for _ in range(60):
        cluster.reconcile_once(die_after=1)
        cluster.start_pods()
        cluster.succeed_all()
        cluster.job_controller()
        cluster.catch_up()
    assert is_condition_true(cluster.status.conditions, ConditionType.SUCCEEDED)


def test_an_operator_that_dies_between_the_new_number_and_the_deletion_deletes_the_old_job_later() -> None:
    cluster = SimulatedCluster(a_job().nodes(2))
    while not any(pod.role is Role.TRAIN and pod.phase == "Running" for pod in cluster.children.pods):
        cluster.reconcile_once()
        cluster.start_pods()
        if not any(pod.role is Role.TRAIN for pod in cluster.children.pods):
            cluster.succeed_all()
        cluster.job_controller()
        cluster.catch_up()
    cluster.reconcile_once()
    cluster.end_pod(1, FailureClass.INTERNAL)
    cluster.job_controller()
    cluster.catch_up()
    cluster.reconcile_once(die_after=1)
    assert cluster.status.attempt == 1
    assert not any(job.deleting for job in cluster.children.batch_jobs)
    cluster.reconcile_once()
    assert [job.name for job in cluster.children.batch_jobs if job.deleting] == ["tune-train-0"]
    cluster.settle()
    assert is_condition_true(cluster.status.conditions, ConditionType.SUCCEEDED)
    assert cluster.status.restarts.counted == 1

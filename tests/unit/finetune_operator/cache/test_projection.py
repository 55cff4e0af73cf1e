from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_job.names import Role
from finetune_operator.cache.projection import batch_job_view, pod_view
from tests.unit.finetune_operator import objects


def test_pod_of_a_failed_rank() -> None:
    document = objects.pod(attempt=2, index=3)
    document["spec"]["nodeName"] = "node-7"
    document["status"] = {
        "phase": "Failed",
        "podIP": "10.0.0.9",
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}],
        "containerStatuses": [
            {
                "state": {
                    "terminated": {
                        "exitCode": 137,
                        "reason": "OOMKilled",
                        "message": "last words",
                        "startedAt": "2026-01-02T03:05:00Z",
                        "finishedAt": "2026-01-02T03:06:00Z",
                    }
                }
            }
        ],
    }
    document["metadata"] |= {"deletionTimestamp": "2026-01-02T03:07:30Z", "deletionGracePeriodSeconds": 30}
    view = pod_view(document)
    assert (view.role, view.attempt, view.node_rank) == (Role.TRAIN, 2, 3)
    assert (view.exit_code, view.reason, view.termination_message) == (137, "OOMKilled", "last words")
    assert view.started == datetime(2026, 1, 2, 3, 5, tzinfo=UTC)
    assert view.finished == datetime(2026, 1, 2, 3, 6, tzinfo=UTC)
    assert view.deletion_requested == datetime(2026, 1, 2, 3, 7, tzinfo=UTC)
    assert (view.disruption, view.node, view.pod_ip) == ("EvictionByEvictionAPI", "node-7", "10.0.0.9")


def container(name: str = "trainer", **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


def condition(kind: str, status: str, **more: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": status, **more}]}


def disrupted(status: str) -> dict[str, Any]:
    return condition("DisruptionTarget", status, reason="PreemptionByScheduler")


READY = "PodReadyToStartContainers"
KILLED = container(terminated={"exitCode": 137, "reason": "Error"})
EVICTED = {"reason": "Evicted", "message": "Usage of EmptyDir", "containerStatuses": [KILLED]}
POD_STATUSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no node has room": (condition("PodScheduled", "False", message="0/3 nodes"), {"unschedulable": "0/3 nodes"}),
    "an image cannot be pulled": (
        {"containerStatuses": [container(waiting={"reason": "ImagePullBackOff", "message": "image a:1 not found"})]},
        {"waiting_reason": "ImagePullBackOff", "waiting_message": "image a:1 not found", "exit_code": None},
    ),
    "it waits for an init container": (
        {
            "containerStatuses": [container(waiting={"reason": "PodInitializing"})],
            "initContainerStatuses": [container("mesh", waiting={"reason": "ErrImagePull"})],
        },
        {"waiting_reason": "ErrImagePull"},
    ),
    "an injected container comes first": (
        {"containerStatuses": [container("proxy", running={"startedAt": objects.CREATED}), KILLED]},
        {"exit_code": 137},
    ),
    "it has its volumes and its network": (
        condition(READY, "True", lastTransitionTime="2026-01-02T03:05:09Z"),
        {"prepared": datetime(2026, 1, 2, 3, 5, 9, tzinfo=UTC)},
    ),
    "it has neither": (condition(READY, "False", lastTransitionTime="2026-01-02T03:05:09Z"), {"prepared": None}),
    "it is preempted": (disrupted("True"), {"disruption": "PreemptionByScheduler"}),
    # The disruption controller removes the mark from a pod that was not deleted after all.
    "its disruption was called off": (disrupted("False"), {"disruption": ""}),
    "its disruption is unknown": (disrupted("Unknown"), {"disruption": ""}),
    "it was evicted without a container": ({"phase": "Failed", "reason": "Evicted"}, {"reason": "Evicted"}),
    "it was evicted and its container killed": (EVICTED, {"reason": "Error", "exit_code": 137, "eviction": "Usage of EmptyDir"}),
    "it was not evicted": ({**EVICTED, "reason": "Preempting"}, {"eviction": ""}),
}


@pytest.mark.parametrize("case", POD_STATUSES)
def test_status_of_a_pod(case: str) -> None:
    status, expected = POD_STATUSES[case]
    view = pod_view(objects.pod(status={"phase": "Pending", **status}))
    assert {name: getattr(view, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("written", "gates"),
    [
        ("finetune.dev/preflight", ("finetune.dev/preflight",)),
        (" a.b/c , finetune.dev/preflight,,", ("a.b/c", "finetune.dev/preflight")),
        ("", ()),
        (7, ()),
        ("a.b/c," * 1000, ()),
    ],
    ids=["ours", "others too", "none", "no text", "too long"],
)
def test_gates_of_a_job_are_read_whatever_they_contain(written: Any, gates: tuple[str, ...]) -> None:
    document = objects.batch_job()
    document["metadata"]["annotations"] = {"kueue.x-k8s.io/admission-gated-by": written}
    view = batch_job_view(document)
    assert view.admission_gates == gates


def test_batch_job_shows_only_conditions_that_hold() -> None:
    document = objects.batch_job(role="merge")
    document["spec"] = {"suspend": True}
    document["status"] = {
        "startTime": "2026-01-02T03:05:00Z",
        "conditions": [
            {
                "type": "FailureTarget",
                "status": "True",
                "reason": "BackoffLimitExceeded",
                "message": "m",
                "lastTransitionTime": "2026-01-02T03:06:00Z",
            },
            {"type": "Suspended", "status": "False"},
        ],
    }
    view = batch_job_view(document)
    assert (view.role, view.suspended) == (Role.MERGE, True)
    assert view.has("FailureTarget")
    assert view.conditions[0].since == datetime(2026, 1, 2, 3, 6, tzinfo=UTC)
    assert not view.has("Suspended")


@pytest.mark.parametrize("labels", [{}, {"finetune.dev/role": "sidecar", "finetune.dev/attempt": "7"}])
def test_role_and_attempt_stand_in_a_name_that_nobody_can_change(labels: dict[str, str]) -> None:
    """Labels can be taken off or rewritten; a Job of ours that is not known as one would be created again without end."""
    pod, batch_job = objects.pod(attempt=3), objects.batch_job(role="merge", attempt=2)
    pod["metadata"]["labels"] = batch_job["metadata"]["labels"] = labels
    pod_seen, job_seen = pod_view(pod), batch_job_view(batch_job)
    assert (pod_seen.role, pod_seen.attempt) == (Role.TRAIN, 3)
    assert (job_seen.role, job_seen.attempt) == (Role.MERGE, 2)


def test_job_of_another_name_and_pod_of_another_controller_are_not_read() -> None:
    batch_job, pod = objects.batch_job(), objects.pod()
    batch_job["metadata"]["name"] = "tune-sidecar-0"
    pod["metadata"]["ownerReferences"][0]["kind"] = "ReplicaSet"
    assert batch_job_view(batch_job) is None
    assert pod_view(pod) is None


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [("tune-train-0", True), ("tune-train-0-copy", False), ("tune-train-x", False), ("tune-evaluate-0", False)],
)
def test_the_whole_name_of_a_job_says_what_it_is_for(name: str, is_ours: bool) -> None:
    document = objects.batch_job()
    document["metadata"]["name"] = name
    assert (batch_job_view(document) is not None) is is_ours


@pytest.mark.parametrize(("written", "read"), [(2, 2), ("2", None)])
def test_a_job_shows_how_many_pods_it_has(written: Any, read: int | None) -> None:
    view = batch_job_view(objects.batch_job(spec={"parallelism": written}))
    assert view.parallelism == read

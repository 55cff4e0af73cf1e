import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_job.names import Role
from finetune_operator.cluster.kinds import JOBS
from finetune_operator.cluster.projection import batch_job_view, pod_view, project
from tests.unit.finetune_operator.cluster import objects


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
    assert view is not None
    assert (view.role, view.attempt, view.node_rank) == (Role.TRAIN, 2, 3)
    assert (view.exit_code, view.reason, view.termination_message) == (137, "OOMKilled", "last words")
    assert view.started == datetime(2026, 1, 2, 3, 5, tzinfo=UTC)
    assert view.finished == datetime(2026, 1, 2, 3, 6, tzinfo=UTC)
    assert view.deletion_requested == datetime(2026, 1, 2, 3, 7, tzinfo=UTC)
    assert (view.disruption, view.node, view.pod_ip) == ("EvictionByEvictionAPI", "node-7", "10.0.0.9")


def test_pod_that_cannot_start() -> None:
    status = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}],
        "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "image a:1 not found"}}}],
    }
    view = pod_view(objects.pod(status=status))
    assert view is not None
    assert (view.waiting_reason, view.unschedulable, view.exit_code) == ("ImagePullBackOff", "0/3 nodes are available", None)
    assert view.waiting_message == "image a:1 not found"


def test_pod_with_its_volumes_and_network_says_since_when() -> None:
    moment, ready = "2026-01-02T03:05:09Z", "PodReadyToStartContainers"
    for status, expected in (("True", datetime(2026, 1, 2, 3, 5, 9, tzinfo=UTC)), ("False", None)):
        conditions = [{"type": ready, "status": status, "lastTransitionTime": moment}]
        view = pod_view(objects.pod(status={"phase": "Pending", "conditions": conditions}))
        assert view is not None
        assert view.prepared == expected


def test_evicted_pod_without_containers_tells_the_pods_reason() -> None:
    view = pod_view(objects.pod(status={"phase": "Failed", "reason": "Evicted"}))
    assert view is not None
    assert view.reason == "Evicted"


@pytest.mark.parametrize(("status", "disruption"), [("True", "PreemptionByScheduler"), ("False", ""), ("Unknown", "")])
def test_disruption_that_was_called_off_is_none(status: str, disruption: str) -> None:
    """The disruption controller takes a mark back from a pod that was not deleted after all; it would be told as an eviction."""
    condition = {"type": "DisruptionTarget", "status": status, "reason": "PreemptionByScheduler", "message": "m"}
    view = pod_view(objects.pod(status={"phase": "Running", "conditions": [condition]}))
    assert view is not None
    assert view.disruption == disruption


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
def test_gates_of_a_job_are_read_whatever_stands_there(written: Any, gates: tuple[str, ...]) -> None:
    document = objects.batch_job()
    document["metadata"]["annotations"] = {"kueue.x-k8s.io/admission-gated-by": written}
    view = batch_job_view(document)
    assert view is not None
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
    assert view is not None
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
    assert pod_seen is not None
    assert job_seen is not None
    assert (pod_seen.role, pod_seen.attempt) == (Role.TRAIN, 3)
    assert (job_seen.role, job_seen.attempt) == (Role.MERGE, 2)


def test_job_of_another_name_and_pod_of_another_controller_are_not_read() -> None:
    batch_job, pod = objects.batch_job(), objects.pod()
    batch_job["metadata"]["name"] = "tune-sidecar-0"
    pod["metadata"]["ownerReferences"][0]["kind"] = "ReplicaSet"
    assert batch_job_view(batch_job) is None
    assert pod_view(pod) is None


def test_container_of_ours_counts_although_an_injected_one_comes_first() -> None:
    ended = {"terminated": {"exitCode": 47, "reason": "Error"}}
    statuses = [{"name": "proxy", "state": {"running": {"startedAt": objects.CREATED}}}, {"name": "trainer", "state": ended}]
    view = pod_view(objects.pod(status={"phase": "Running", "containerStatuses": statuses}))
    assert view is not None
    assert view.exit_code == 47


def test_container_that_waits_for_an_init_container_shows_why_that_one_waits() -> None:
    status = {
        "phase": "Pending",
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
        "initContainerStatuses": [{"name": "mesh", "state": {"waiting": {"reason": "ErrImagePull"}}}],
    }
    view = pod_view(objects.pod(status=status))
    assert view is not None
    assert view.waiting_reason == "ErrImagePull"


def test_jobs_that_ended_alike_share_what_is_kept_of_their_ends() -> None:
    conditions = [{"type": "Finished", "status": "True", "reason": "Completed"}]
    attempts = [{"role": "train", "number": 0, "outcome": "Failed", "failure": "Infrastructure", "counted": True}]
    status = {"conditions": conditions, "attempts": attempts}
    one, other = (project(JOBS, objects.finetune_job(status=copy.deepcopy(status), uid=uid)).summary for uid in ("one", "other"))
    assert one is not None
    assert other is not None
    assert one.conditions == (("Finished", "True", "Completed"),)
    assert one.outcomes == (("Failed", "Infrastructure", True),)
    assert one.conditions is other.conditions
    assert one.outcomes is other.outcomes


def test_batch_jobs_that_succeeded_share_the_words_of_the_job_controller() -> None:
    def message() -> str:
        said = b"Reached expected number of succeeded pods".decode()  # another object each time, as from the network
        view = batch_job_view(objects.batch_job(status={"conditions": [{"type": "Complete", "status": "True", "message": said}]}))
        assert view is not None
        return view.conditions[0].message

    assert message() == "Reached expected number of succeeded pods"
    assert message() is message()


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
    assert view is not None
    assert view.parallelism == read


def test_why_the_kubelet_evicted_a_pod_is_told_apart_from_how_its_container_ended() -> None:
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}
    status = {"phase": "Failed", "reason": "Evicted", "message": "Usage of EmptyDir", "containerStatuses": [ended]}
    view = pod_view(objects.pod(status=status))
    assert view is not None
    assert (view.reason, view.exit_code, view.eviction) == ("Error", 137, "Usage of EmptyDir")
    preempted = pod_view(objects.pod(status={**status, "reason": "Preempting"}))
    assert preempted is not None
    assert preempted.eviction == ""


RAN = {
    "startedAt": "2026-01-02T03:05:00Z",
    "finishedAt": "2026-01-02T03:06:00Z",
    "exitCode": 52,
    "reason": "Error",
    "message": "m",
}


@pytest.mark.parametrize(
    ("container", "restarts", "exit_code"),
    [
        (
            {"state": {"running": {"startedAt": "2026-01-02T03:06:01Z"}}, "lastState": {"terminated": RAN}, "restartCount": 1},
            1,
            52,
        ),
        ({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": RAN}, "restartCount": 0}, 1, 52),
        ({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": RAN}, "restartCount": 1}, 2, 52),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}, "restartCount": 0}, 0, None),
        ({"state": {"terminated": RAN}, "restartCount": 0}, 0, None),
        ({"state": {"running": {}}, "lastState": {"terminated": {}}, "restartCount": 3}, 0, None),
        ({"state": {"running": {}}, "lastState": {"terminated": RAN}, "restartCount": "many"}, 0, 52),
        ({"state": {"running": {}}, "lastState": {"terminated": RAN}, "restartCount": -5}, 0, 52),
        ({"state": {"running": {}}, "lastState": [RAN], "restartCount": 1}, 0, None),
    ],
)
def test_a_container_that_was_started_again_tells_how_often_and_how_it_ended(
    container: dict[str, Any], restarts: int, exit_code: int | None
) -> None:
    status = {"phase": "Running", "containerStatuses": [{"name": "trainer", **container}]}
    view = pod_view(objects.pod(status=status))
    assert view is not None
    assert (view.restarts, None if view.earlier is None else view.earlier.exit_code) == (restarts, exit_code)
    if view.earlier is not None:
        assert (view.earlier.reason, view.earlier.termination_message) == ("Error", "m")
        assert view.earlier.finished is not None
        assert view.earlier.started is not None
        assert (view.earlier.finished - view.earlier.started).total_seconds() == 60


def test_the_attempt_in_a_pods_label_is_kept_with_that_of_its_job() -> None:
    document = objects.pod(attempt=3)
    document["metadata"]["labels"]["finetune.dev/attempt"] = "4"
    view = pod_view(document)
    assert view is not None
    assert (view.attempt, view.label_attempt) == (3, 4)


@pytest.mark.parametrize(
    ("containers", "restarts"),
    [
        ([{"name": "trainer", "restartPolicyRules": [{"action": "Restart"}]}], True),
        ([{"name": "proxy", "restartPolicyRules": [{"action": "Restart"}]}, {"name": "trainer"}], False),
        ([{"name": "trainer"}], False),
        ("none", False),
    ],
)
def test_a_job_shows_whether_the_server_took_the_rule_for_starting_its_container_again(containers: Any, restarts: bool) -> None:
    view = batch_job_view(objects.batch_job(spec={"template": {"spec": {"containers": containers}}}))
    assert view is not None
    assert view.restarts_container is restarts

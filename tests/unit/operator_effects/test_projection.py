from datetime import UTC, datetime

from finetune_job.names import Role
from finetune_operator.cluster.projection import batch_job_view, pod_view
from tests.unit.operator_effects import objects


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
        "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}],
    }
    view = pod_view(objects.pod(status=status))
    assert view is not None
    assert (view.waiting_reason, view.unschedulable, view.exit_code) == ("ImagePullBackOff", "0/3 nodes are available", None)


def test_evicted_pod_without_containers_tells_the_pods_reason() -> None:
    view = pod_view(objects.pod(status={"phase": "Failed", "reason": "Evicted"}))
    assert view is not None
    assert view.reason == "Evicted"


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


def test_objects_with_foreign_labels_are_not_taken_for_ours() -> None:
    document = objects.pod()
    document["metadata"]["labels"]["finetune.dev/role"] = "sidecar"
    assert pod_view(document) is None

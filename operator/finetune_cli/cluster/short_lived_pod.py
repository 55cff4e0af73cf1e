"""Short-lived pods for commands: builds their documents, creates them, waits for them and deletes them.

A command always deletes its pods. If this machine dies first, the pods end by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster, collection
from finetune_cli.jobs import documents
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.seen import seen_pod
from finetune_job.names import Role
from finetune_job.plan.launch_plan import Placement
from finetune_operator.children.placement import apply_placement
from finetune_operator.children.pod_template import container_security_context, pod_security_context

SECONDS = 300
"""Time limit for a pod to start running or to end, including image pulls."""
DELETE_NOW = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
_POLL_SECONDS = 0.5


def pod_document(
    metadata: Mapping[str, Any], placement: Placement, role: Role, container: Mapping[str, Any], *, seconds: int, memory: str
) -> dict[str, Any]:
    """Return a pod that runs a container with the image, user and placement of a role's pods."""
    resources = {"cpu": "100m", "memory": memory}
    settings = {
        "image": placement.trainer_image,
        "imagePullPolicy": placement.image_pull_policy,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": container_security_context(),
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        # The pod ends even if nobody deletes it.
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": placement.service_account_name,
        "securityContext": pod_security_context(placement),
        "containers": [{**settings, **container}],
    }
    template = {"metadata": dict(metadata), "spec": spec}
    apply_placement(template, placement, role)
    return {"apiVersion": "v1", "kind": "Pod", **template}


@contextmanager
def short_lived(
    cluster: Cluster, document: dict[str, Any], namespace: str, phase: str, pause: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Create a pod, wait until it is in `phase`, yield its path, and always delete the pod. Raises ClusterError."""
    name, pods = document["metadata"]["name"], collection("v1", "pods", namespace)
    path = f"{pods}/{name}"
    try:
        cluster.send("POST", pods, document)
    except ClusterError as error:
        if error.status is None:
            # No answer came, but the request may have been carried out, so the pod is deleted.
            with suppress(ClusterError):
                _delete(cluster, path)
        raise
    try:
        waited = 0.0
        while True:
            current = cluster.get("v1", "pods", name, namespace)
            if current is None:
                raise ClusterError(f"the pod {name}, which was to read the claim, was deleted by somebody else")
            pod = seen_pod(current)
            if pod.phase == phase:
                break
            if pod.phase in ("Failed", "Succeeded") or waited > SECONDS:
                reasons = [f"{container.reason}: {container.message}" for container in pod.containers if container.reason]
                why = reasons[0] if reasons else documents.text(current, "status", "message") or pod.phase
                raise ClusterError(f"the pod {name}, which was to read the claim, did not do so ({plain(why, 300)})")
            pause(_POLL_SECONDS)
            waited += _POLL_SECONDS
        yield path
    finally:
        _delete(cluster, path)


def _delete(cluster: Cluster, path: str) -> None:
    """Delete the pod if it exists. Raises ClusterError that names the pod if it cannot be deleted."""
    try:
        cluster.send("DELETE", path, DELETE_NOW)
    except ClusterError as error:
        if error.status != 404:
            raise ClusterError(f"delete what was left: {path} ({error})", status=error.status) from error

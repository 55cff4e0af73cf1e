"""A pod that lives for seconds and prints what a workspace holds: the logs, the history and the checkpoints of a job.

It runs with the image, user, placement and claim of the job's own pods, as the frozen plan has them, and mounts the claim for
reading alone. It is deleted in any case; if this machine dies meanwhile, the pod ends by itself and goes with its job.
"""

from __future__ import annotations

import copy
import json
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import ValidationError

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster, collection
from finetune_cli.jobs import documents
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.seen import SeenJob, seen_pod
from finetune_job.names import API_VERSION, CLAIMS_MOUNT, JOB_KIND, PLAN_KEY, Role, plan_configmap_name
from finetune_job.plan.launch_plan import LaunchPlan, Placement, read_launch_plan
from finetune_operator.children.placement import apply_placement
from finetune_operator.children.pod_template import container_security_context, pod_security_context

LABEL = "finetune.dev/reader"
SECONDS = 300
"""How long the pod may take to print what it reads, or to run, pulls of the image included."""
MOST_BYTES = 4 << 20
"""Bytes that are read from the end of each file, and printed of all files: a kubelet keeps 10 MiB of a log by default."""
_POLL_SECONDS = 0.5

SCRIPT = """
import json, os, sys
root, most, tail, *names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
left = most
def say(**values):
    global left
    text = json.dumps(values)
    left -= len(text)
    if left > 0 or "end" in values:
        print(text, flush=True)
def files(name):
    path = os.path.join(root, name)
    if os.path.isdir(path):
        return [os.path.join(name, each) for each in sorted(os.listdir(path))]
    return [name]
for name in [each for asked in names for each in files(asked)]:
    path = os.path.join(root, name)
    try:
        # A name on the claim must not lead out of it, nor to a pipe that never ends.
        if os.path.islink(path):
            continue
        if os.path.isdir(path):
            parts = [os.path.join(path, each) for each in os.listdir(path)]
            size = sum(os.path.getsize(each) for each in parts if os.path.isfile(each))
            complete = os.path.isfile(os.path.join(path, "manifest.json"))
            say(file=name, directory=True, bytes=size, complete=complete, time=os.path.getmtime(path))
        elif os.path.isfile(path):
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - most, 0))
                lines = file.read(most).decode(errors="replace").splitlines()
            cut = size > most or 0 < tail < len(lines)
            say(file=name, bytes=size, cut=cut)
            for line in lines[-tail:] if tail else lines:
                say(file=name, line=line)
    except OSError as error:
        say(file=name, error=str(error))
say(end=True, cut=left <= 0)
"""
"""Prints a JSON object per line: a file with its size, each of its last lines, a directory with its size, and the end."""


class WorkspaceAccess:
    """Place of a job's files, and the settings with which its pods read them."""

    def __init__(self, plan: LaunchPlan, placement: Placement) -> None:
        self.claim = plan.workspace.claim
        self.path = plan.workspace.path
        self.placement = placement
        self._output = plan.output
        self.published_at = "" if plan.publish is None else plan.publish.destination
        """Address outside the cluster; empty: the results stay on their claim."""

    def of_results(self) -> WorkspaceAccess:
        """Return the place of the job's results."""
        other = copy.copy(self)
        other.claim, other.path = self._output.claim, self._output.path
        return other


def workspace_of(cluster: Cluster, job: SeenJob) -> WorkspaceAccess:
    """Find the place of a job's files in its frozen plan. Raises ClusterError."""
    config_map = cluster.get("v1", "configmaps", plan_configmap_name(job.name), job.namespace)
    if config_map is None:
        raise ClusterError(
            f"{job.title}: its plan (ConfigMap {plan_configmap_name(job.name)}) is gone or was never made, so where its "
            "files are is not known; look on the claim that spec.workspace names"
        )
    try:
        plan = read_launch_plan(documents.text(config_map, "data", PLAN_KEY))
    except ValidationError as error:
        raise ClusterError(f"{job.title}: its plan is not one that this release of `finetune` can read") from error
    if plan.placement is None:
        raise ClusterError(f"{job.title}: its plan says of no pods")
    return WorkspaceAccess(plan, plan.placement)


def reader_pod(job: SeenJob, workspace: WorkspaceAccess, suffix: str, names: list[str], tail: int) -> dict[str, Any]:
    """The pod as a document. `names`: files and directories below the job's folder; `tail`: lines of each, 0 for all."""
    placement = workspace.placement
    root = f"{CLAIMS_MOUNT}/{workspace.claim}/{workspace.path}"
    amounts = {"cpu": "100m", "memory": "256Mi"}
    container = {
        "name": "reader",
        "image": placement.trainer_image,
        "imagePullPolicy": placement.image_pull_policy,
        "command": ["python", "-c", SCRIPT, root, str(MOST_BYTES), str(tail), *names],
        "env": [],
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "securityContext": container_security_context(),
        "volumeMounts": [{"name": "workspace", "mountPath": f"{CLAIMS_MOUNT}/{workspace.claim}", "readOnly": True}],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        # Also if nobody is left to delete it.
        "activeDeadlineSeconds": SECONDS,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": placement.service_account_name,
        "securityContext": pod_security_context(placement),
        "containers": [container],
        "volumes": [{"name": "workspace", "persistentVolumeClaim": {"claimName": workspace.claim, "readOnly": True}}],
    }
    owner = {"apiVersion": API_VERSION, "kind": JOB_KIND, "name": job.name, "uid": job.uid}
    metadata = {"name": f"finetune-reader-{suffix}", "labels": {LABEL: suffix}, "ownerReferences": [owner]}
    template = {"metadata": metadata, "spec": spec}
    apply_placement(template, placement, Role.MERGE)
    return {"apiVersion": "v1", "kind": "Pod", **template}


def read_workspace(
    cluster: Cluster,
    job: SeenJob,
    names: list[str],
    tail: int = 0,
    pause: Callable[[float], None] = time.sleep,
    *,
    of_results: bool = False,
) -> Generator[Mapping[str, Any]]:
    """Yield what the pod prints, one file after another. of_results: read the folder of the results instead of the job's own.

    Raises ClusterError, also if the pod cannot run or ends early.
    """
    access = workspace_of(cluster, job)
    document = reader_pod(job, access.of_results() if of_results else access, secrets.token_hex(4), names, tail)
    with short_lived(cluster, document, job.namespace, "Succeeded", pause) as path:
        yield from _printed(cluster, path, job)


@contextmanager
def short_lived(
    cluster: Cluster, document: dict[str, Any], namespace: str, phase: str, pause: Callable[[float], None]
) -> Iterator[str]:
    """Make a pod, wait until it is in that phase, give its path, and delete it in any case. Raises ClusterError."""
    name, pods = document["metadata"]["name"], collection("v1", "pods", namespace)
    try:
        cluster.send("POST", pods, document)
    except ClusterError as error:
        if error.status is None:
            # It may have been carried out.
            with suppress(ClusterError):
                _delete(cluster, f"{pods}/{name}")
        raise
    try:
        _wait_for(cluster, name, namespace, phase, pause)
        yield f"{pods}/{name}"
    finally:
        _delete(cluster, f"{pods}/{name}")


def _printed(cluster: Cluster, path: str, job: SeenJob) -> Iterator[Mapping[str, Any]]:
    has_end = False
    for line in cluster.lines(f"{path}/log", {}, 30.0):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            has_end = has_end or entry.get("end") is True
            yield entry
    if not has_end:
        raise ClusterError(f"{job.title}: the pod that reads its workspace ended early; what came before is all there is")


def _delete(cluster: Cluster, path: str) -> None:
    """Delete the pod if it is there. Raises ClusterError, which names what was left."""
    try:
        cluster.send("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})
    except ClusterError as error:
        if error.status != 404:
            raise ClusterError(f"delete what was left: {path} ({error})", status=error.status) from error


def _wait_for(cluster: Cluster, name: str, namespace: str, phase: str, pause: Callable[[float], None]) -> None:
    waited = 0.0
    while True:
        document = cluster.get("v1", "pods", name, namespace)
        if document is None:
            raise ClusterError(f"the pod {name}, which was to read the claim, was deleted by somebody else")
        pod = seen_pod(document)
        if pod.phase == phase:
            return
        if pod.phase in ("Failed", "Succeeded") or waited > SECONDS:
            reasons = [f"{one.reason}: {one.message}" for one in pod.containers if one.reason]
            why = reasons[0] if reasons else documents.text(document, "status", "message") or pod.phase
            raise ClusterError(f"the pod {name}, which was to read the claim, did not do so ({plain(why, 300)})")
        pause(_POLL_SECONDS)
        waited += _POLL_SECONDS

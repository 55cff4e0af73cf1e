"""A short-lived pod that prints the logs, the history and the checkpoints of a job from its workspace.

It has the image, user, placement and claim of the job's own pods, from the frozen plan, and mounts the claim read-only. If this
machine dies, the pod is deleted with its job.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster
from finetune_cli.cluster.short_lived_pod import SECONDS, pod_document, short_lived
from finetune_cli.jobs import documents
from finetune_cli.jobs.seen import SeenJob
from finetune_job.api.base import ClaimPath
from finetune_job.names import API_VERSION, CLAIMS_MOUNT, JOB_KIND, PLAN_KEY, Role, plan_configmap_name
from finetune_job.plan.launch_plan import Placement, read_launch_plan

CONTAINER = "reader"
LABEL = "finetune.dev/reader"
MOST_BYTES = 4 << 20
"""Maximum bytes read from the end of each file, and maximum bytes printed in total; a kubelet keeps 10 MiB of a log."""

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
"""Prints one JSON object per line: a file's size and then each of its last lines, or a directory's size; finally, an end mark."""


@dataclass(frozen=True)
class WorkspaceAccess:
    """The places of a job's files, and the settings of the pods that read them."""

    workspace: ClaimPath
    results: ClaimPath
    placement: Placement
    published_at: str
    """Address where the results are published; empty: they stay on their claim."""


def workspace_of(cluster: Cluster, job: SeenJob) -> WorkspaceAccess:
    """Find the places of a job's files in its frozen plan. Raises ClusterError."""
    config_map = cluster.get("v1", "configmaps", plan_configmap_name(job.name), job.namespace)
    if config_map is None:
        raise ClusterError(
            f"{job.title}: its plan (ConfigMap {plan_configmap_name(job.name)}) is gone or was never made, so it is not "
            "known where its files are; look on the claim that spec.workspace names"
        )
    try:
        plan = read_launch_plan(documents.text(config_map, "data", PLAN_KEY))
    except ValidationError as error:
        raise ClusterError(f"{job.title}: this release of `finetune` cannot read its plan") from error
    if plan.placement is None:
        raise ClusterError(f"{job.title}: its plan names no pods")
    published_at = "" if plan.publish is None else plan.publish.destination
    return WorkspaceAccess(plan.workspace, plan.output, plan.placement, published_at)


def root_of(place: ClaimPath) -> str:
    """Return the path at which a pod sees a folder of a claim."""
    return f"{CLAIMS_MOUNT}/{place.claim}/{place.path}".rstrip("/")


def reader_pod(
    job: SeenJob, place: ClaimPath, placement: Placement, command: list[str], seconds: int = SECONDS
) -> dict[str, Any]:
    """Return the document of a pod that runs the command and mounts the claim of `place` read-only."""
    suffix = secrets.token_hex(4)
    container = {
        "name": CONTAINER,
        "command": command,
        "env": [],
        "volumeMounts": [{"name": "workspace", "mountPath": f"{CLAIMS_MOUNT}/{place.claim}", "readOnly": True}],
    }
    owner = {"apiVersion": API_VERSION, "kind": JOB_KIND, "name": job.name, "uid": job.uid}
    metadata = {"name": f"finetune-reader-{suffix}", "labels": {LABEL: suffix}, "ownerReferences": [owner]}
    document = pod_document(metadata, placement, Role.MERGE, container, seconds=seconds, memory="256Mi")
    claim = {"claimName": place.claim, "readOnly": True}
    document["spec"]["volumes"] = [{"name": "workspace", "persistentVolumeClaim": claim}]
    return document


def read_workspace(
    cluster: Cluster,
    job: SeenJob,
    names: list[str],
    tail: int = 0,
    pause: Callable[[float], None] = time.sleep,
    *,
    of_results: bool = False,
) -> Generator[Mapping[str, Any]]:
    """Yield what the pod prints, one file after another.

    names: files and directories below the job's folder, or, with `of_results`, below the folder of its results. tail: number of
    lines from the end of each file; 0: all. Raises ClusterError, also if the pod cannot run or ends early.
    """
    access, has_end = workspace_of(cluster, job), False
    place = access.results if of_results else access.workspace
    command = ["python", "-c", SCRIPT, root_of(place), str(MOST_BYTES), str(tail), *names]
    with short_lived(cluster, reader_pod(job, place, access.placement, command), job.namespace, "Succeeded", pause) as path:
        for line in cluster.lines(f"{path}/log", {}, 30.0):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                has_end = has_end or entry.get("end") is True
                yield entry
        if not has_end:
            raise ClusterError(f"{job.title}: the pod that reads its workspace ended early, so its answer is not complete")

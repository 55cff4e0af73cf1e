"""Records what one release writes: jobs with status, plans, children and pods at each stage of a run, as JSON.

    python tests/releases/record.py TREE OUTPUT

TREE is a checkout of the release (`git worktree add /tmp/release COMMIT`): its own operator decides and its own simulated cluster
plays the rest, so this file uses only what the trees of all releases have. Nothing here depends on the clock: two recordings of a
release are equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

Document = dict[str, Any]

ON_CLAIMS: Document = {
    "model": {"source": "pvc://models/base"},
    "data": {"source": "pvc://data/train.jsonl", "validation": {"source": "pvc://data/held-out.jsonl"}},
    "method": {
        "type": "LoRA",
        "lora": {"r": 8, "loraAlpha": 16, "targetModules": ["q_proj", "v_proj"], "rankPattern": {"q_proj": 4}},
    },
    "training": {"maxSteps": 10, "globalBatchSize": 48, "learningRate": "2e-4"},
    "parallelism": {"nodes": 2, "processesPerNode": 2},
    "evaluation": {"everySteps": 5},
    "output": {"destination": "pvc://results/tune"},
    "workspace": {"claimName": "scratch"},
    "run": {"maxRestarts": 2},
}
ELSEWHERE: Document = ON_CLAIMS | {
    "model": {"source": "hf://org/base", "revision": "a" * 40},
    "data": {"source": "s3://bucket/train.jsonl"},
    "fetch": {"hubTokenSecretRef": {"name": "hub", "key": "read"}, "s3SecretRef": {"name": "store"}},
    "evaluation": {},
}
PUBLISHED: Document = ELSEWHERE | {"output": {"destination": "s3://results/tune", "secretRef": {"name": "store"}}}
WHOLE: Document = ON_CLAIMS | {
    "method": {"type": "Full"},
    "merge": {"enabled": False},
    "parallelism": {"nodes": 1, "processesPerNode": 1},
}
SCENARIOS = {"on-claims": (ON_CLAIMS,), "elsewhere": (PUBLISHED, ELSEWHERE), "whole": (WHOLE,)}
"""Manifests by name: the first that the release accepts is recorded."""
PROFILE: Document = {
    "trainerImage": "registry.example/trainer@sha256:" + "a" * 64,
    "gpu": {"memory": "80Gi"},
    "runAsUser": 1000,
    "fsGroup": 1000,
    "nodeSelector": {"accelerator": "h100"},
    "resources": {"train": {"cpu": "4", "memory": "32Gi"}},
}


@dataclass
class Recording:
    """One job of one release."""

    cluster: Any
    bodies: dict[str, Document] = field(default_factory=dict)
    states: list[Document] = field(default_factory=list)
    """What the cluster holds of each Job and pod besides its body, each state once."""
    stages: dict[str, Document] = field(default_factory=dict)

    def snapshot(self, stage: str) -> None:
        """Keep what there is under a name, the first time."""
        cluster = self.cluster
        if stage in self.stages:
            return
        children = cluster.children
        names = [f"Job/{one.name}" for one in children.batch_jobs]
        names += ["ConfigMap/tune-plan"] if children.plan is not None else []
        names += ["Service/tune-gang"] if children.service_exists else []
        self.stages[stage] = {
            "now": text(cluster.now),
            "status": cluster.status.model_dump(mode="json", by_alias=True, exclude_none=True),
            "children": sorted(names),
            "jobs": [self.state(job_status(one)) for one in children.batch_jobs],
            "pods": [self.state(pod_document(one, children.batch_jobs)) for one in children.pods if not one.gone],
        }

    def state(self, document: Document) -> int:
        """Number of this state among all."""
        if document not in self.states:
            self.states.append(document)
        return self.states.index(document)


def text(moment: datetime) -> str:
    """RFC 3339 as Kubernetes writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def job_status(job: Any) -> Document:
    """What the API server and the Job controller add to a Job."""
    metadata = {"name": job.name, "uid": job.uid, "resourceVersion": "1", "creationTimestamp": text(job.created)}
    if job.deleting:
        metadata["deletionTimestamp"] = text(job.created)
    conditions = [
        {"type": one.type, "status": "True", "reason": one.reason, "message": one.message}
        | ({"lastTransitionTime": text(one.since)} if one.since else {})
        for one in job.conditions
    ]
    return {"metadata": metadata, "status": {"startTime": text(job.start_time), "conditions": conditions}}


def pod_document(pod: Any, jobs: tuple[Any, ...]) -> Document:
    """A pod as the API server shows it, as much as an operator reads."""
    job = pod.name.rsplit("-", 2)[0]
    owner = next((one.uid for one in jobs if (one.role, one.attempt) == (pod.role, pod.attempt)), "")
    metadata: Document = {
        "name": pod.name,
        "namespace": "team",
        "uid": pod.uid,
        "resourceVersion": "1",
        "creationTimestamp": text(pod.created),
        "annotations": {"batch.kubernetes.io/job-completion-index": str(pod.node_rank)},
        "labels": {
            "app.kubernetes.io/managed-by": "finetune-operator",
            "finetune.dev/job": "tune",
            "finetune.dev/role": str(pod.role),
            "finetune.dev/attempt": str(pod.attempt),
        },
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": owner, "controller": True}],
    }
    if pod.deletion_requested is not None:
        metadata |= {"deletionTimestamp": text(pod.deletion_requested), "deletionGracePeriodSeconds": 0}
    state: Document = {}
    if pod.exit_code is not None:
        state = {
            "terminated": {
                "exitCode": pod.exit_code,
                "reason": pod.reason,
                "startedAt": text(pod.started),
                "finishedAt": text(pod.finished),
                "message": pod.termination_message,
            }
        }
    elif pod.started is not None:
        state = {"running": {"startedAt": text(pod.started)}}
    return {"metadata": metadata, "status": {"phase": pod.phase, "containerStatuses": [{"name": "trainer", "state": state}]}}


def record(manifest: Mapping[str, Any]) -> Document:
    """One job from its first sight to its end, with one failure of the gang on the way."""
    from finetune_job.api.job import parse_job
    from finetune_job.api.profile import FineTuneProfileSpec
    from finetune_job.failures import FailureClass
    from tests.support.builders import UID, JobBuilder
    from tests.support.simulated_cluster import SimulatedCluster

    document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
        "spec": json.loads(json.dumps(manifest)),
    }
    profile = FineTuneProfileSpec.model_validate(PROFILE)
    # The API server fills the defaults of the release's own schema in.
    document["spec"] = parse_job(document).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    cluster = SimulatedCluster(JobBuilder(document, profile))
    recording = Recording(cluster)
    create = cluster._create

    def created(action: Any) -> None:
        recording.bodies[f"{action.kind}/{action.name}"] = json.loads(json.dumps(action.body))
        create(action)

    cluster._create = created
    killed = False
    for _ in range(200):
        cluster.catch_up()
        cluster.reconcile_once()
        cluster.catch_up()
        conditions = {str(one.type): one.status for one in cluster.status.conditions}
        if conditions.get("Finished") == "True":
            recording.snapshot("ended")
            break
        if cluster.status.start_time and cluster.children.plan is None:
            recording.snapshot("frozen")
        elif not cluster.children.batch_jobs and cluster.children.plan is not None:
            recording.snapshot("stored")
        cluster.start_pods()
        cluster.catch_up()
        running = [pod for pod in cluster.children.pods if pod.phase == "Running" and pod.deletion_requested is None]
        if running:
            role, attempt = str(running[0].role), running[0].attempt
            if role == "train":
                recording.snapshot("train-starting")
            cluster.reconcile_once()
            recording.snapshot(f"{role}-running" if attempt == 0 else f"{role}-{attempt}-running")
            if role == "train" and not killed:
                killed = True
                cluster.end_pod(0, FailureClass.COLLECTIVE)
                cluster.job_controller()
                recording.snapshot("train-failing")
                cluster.pass_time(60)
            else:
                cluster.succeed_all()
                cluster.job_controller()
                recording.snapshot(f"{role}-done")
        if killed and cluster.status.attempt == 1:
            recording.snapshot("train-restarting")
        cluster.finish_deletions(with_evidence=True)
        cluster.job_controller()
        cluster.pass_time(30)
    else:
        raise AssertionError(f"the job did not end: {cluster.status}")
    return {
        "job": document,
        "profile": profile.model_dump(mode="json", by_alias=True, exclude_none=True),
        "bodies": recording.bodies,
        "states": recording.states,
        "stages": recording.stages,
    }


def main(tree: Path, output: Path) -> None:
    """Record every scenario that the release accepts."""
    sys.path[:0] = [str(tree / "operator"), str(tree)]
    from pydantic import ValidationError

    from finetune_job.failures import EXIT_CODES, FailureClass
    from tests.support.builders import envelope

    recorded: Document = {
        "exit-codes": {str(one): code for one, code in EXIT_CODES.items()},
        "envelopes": {str(one): envelope(one, message="said", hint="do", rank=1, step=2) for one in FailureClass},
    }
    for name, manifests in SCENARIOS.items():
        for manifest in manifests:
            try:
                recorded[name] = record(manifest)
            except ValidationError:
                continue
            break
    output.write_text(lines(recorded) + "\n")


def lines(content: Any, depth: int = 3) -> str:
    """JSON with a line for each object of a recording."""
    if depth == 0 or not isinstance(content, dict | list) or not content:
        return json.dumps(content, sort_keys=True, separators=(",", ":"))
    if isinstance(content, list):
        return "[\n" + ",\n".join(lines(one, 0) for one in content) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(name)}:{lines(one, depth - 1)}" for name, one in sorted(content.items())) + "\n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))

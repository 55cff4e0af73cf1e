"""Objects as the API server would return them, minimal and valid."""

import copy
from typing import Any

from finetune_job.names import (
    API_VERSION,
    JOB_KIND,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_MANAGED_BY,
    LABEL_ROLE,
    MANAGED_BY,
)

Document = dict[str, Any]
CREATED = "2026-01-02T03:04:05Z"
SPEC: Document = {
    "model": {"source": "pvc://models/base"},
    "data": {"source": "pvc://data/train.jsonl"},
    "training": {"maxSteps": 4, "globalBatchSize": 4},
    "workspace": {"claimName": "workspace"},
    "output": {"destination": "pvc://results/tuned"},
}


def metadata(name: str, uid: str, version: int = 1, **more: Any) -> Document:
    return {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version), "creationTimestamp": CREATED, **more}


def owner(kind: str, name: str, uid: str, api_version: str) -> Document:
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid, "controller": True}


def finetune_job(version: int = 1, status: Document | None = None, uid: str = "job-uid", **spec: Any) -> Document:
    return {
        "apiVersion": API_VERSION,
        "kind": JOB_KIND,
        "metadata": metadata("tune", uid, version, generation=1),
        "spec": copy.deepcopy(SPEC) | spec,  # some tests break what they are given
        **({"status": status} if status is not None else {}),
    }


def labels(role: str, attempt: int) -> Document:
    return {
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_JOB: "tune",
        LABEL_JOB_UID: "job-uid",
        LABEL_ROLE: role,
        LABEL_ATTEMPT: str(attempt),
    }


def batch_job(role: str = "train", attempt: int = 0, version: int = 1, **more: Any) -> Document:
    name = f"tune-{role}-{attempt}"
    references = [owner(JOB_KIND, "tune", "job-uid", API_VERSION)]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(name, f"{name}-uid", version, labels=labels(role, attempt), ownerReferences=references),
        "spec": {},
        "status": {},
        **more,
    }


def pod(role: str = "train", attempt: int = 0, index: int = 0, version: int = 1, status: Document | None = None) -> Document:
    job = f"tune-{role}-{attempt}"
    name = f"{job}-{index}"
    references = [owner("Job", job, f"{job}-uid", "batch/v1")]
    own_labels = labels(role, attempt) | {"batch.kubernetes.io/job-completion-index": str(index)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(name, f"{name}-uid", version, labels=own_labels, ownerReferences=references),
        "spec": {},
        "status": status or {"phase": "Pending"},
    }

"""Jobs of a cluster as its API server holds them, written by hand: succeeded, running, failed, stalled, waiting, new."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

Document = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SPEC: Document = {
    "model": {"source": "pvc://models/base"},
    "data": {"source": "pvc://data/train.jsonl"},
    "method": {"type": "LoRA", "lora": {"r": 16}},
    "training": {"epochs": 1, "learningRate": "2e-4", "microBatchSize": 4, "globalBatchSize": 32},
    "parallelism": {"nodes": 2, "processesPerNode": 4},
    "output": {"destination": "pvc://results/tuned"},
    "run": {"maxRestarts": 3},
    "workspace": {"claimName": "work"},
}
_STAGES = ("Validated", "Fetched", "Prepared", "Rehearsed", "Trained", "Merged", "Published")


def condition(kind: str, status: str, reason: str, message: str = "", time: str = "2026-03-01T10:00:00Z") -> Document:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": 1,
        "lastTransitionTime": time,
    }


def stages(done: int, *more: Document) -> list[Document]:
    """The first so many stages are done; what else is said takes the place of a default."""
    found = {kind: condition(kind, "True", "Completed") for kind in _STAGES[:done]}
    found |= {kind: condition(kind, "Unknown", "Pending") for kind in _STAGES[done:]}
    found |= {kind: condition(kind, "Unknown", "Pending") for kind in ("Ready", "Succeeded")}
    found["Finished"] = condition("Finished", "False", "Running")
    found["Stalled"] = condition("Stalled", "False", "Healthy")
    found["Suspended"] = condition("Suspended", "False", "NotSuspended")
    return list((found | {each["type"]: each for each in more}).values())


def job(name: str, status: Document | None, *, number: int = 1, **spec: Any) -> Document:
    found: Document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{number}",
            "creationTimestamp": "2026-03-01T09:55:00Z",
            "labels": {"finetune.dev/team": "vision"},
        },
        "spec": {**copy.deepcopy(SPEC), **spec},
    }
    if status is not None:
        found["status"] = status
    return found


def attempt(role: str, number: int, outcome: str, start: str, end: str = "", **more: Any) -> Document:
    return {
        "role": role,
        "number": number,
        "startTime": start,
        "scheduledTime": start,
        "runningTime": start,
        "endTime": end,
        "outcome": outcome,
        **more,
    }


_PREPARED = [
    attempt("fetch", 0, "Succeeded", "2026-03-01T10:00:00Z", "2026-03-01T10:04:00Z"),
    attempt("preflight", 0, "Succeeded", "2026-03-01T10:04:00Z", "2026-03-01T10:06:00Z"),
]
_OUT_OF_MEMORY = {
    "failure": "DeviceOutOfMemory",
    "message": "CUDA out of memory: tried to allocate 2.00 GiB",
    "hint": "Lower spec.training.microBatchSize from 4 to 2.",
    "evidence": [
        {
            "pod": "failed-train-0-1",
            "nodeRank": 1,
            "exitCode": 44,
            "failure": "DeviceOutOfMemory",
            "rank": 5,
            "step": 12,
            "message": "CUDA out of memory: tried to allocate 2.00 GiB",
            "node": "gpu-2",
            "time": "2026-03-01T10:20:00Z",
        }
    ],
}
_NODE_LOST = {"failure": "NodeLost", "message": "The node gpu-1 stopped answering."}

SUCCEEDED = job(
    "succeeded",
    {
        "observedGeneration": 1,
        "startTime": "2026-03-01T10:00:00Z",
        "completionTime": "2026-03-01T11:30:00Z",
        "conditions": stages(
            7,
            condition("Succeeded", "True", "Completed"),
            condition("Finished", "True", "Completed", time="2026-03-01T11:30:00Z"),
        ),
        "attempts": [
            *_PREPARED,
            attempt("train", 0, "Succeeded", "2026-03-01T10:06:00Z", "2026-03-01T11:06:00Z"),
            attempt("merge", 0, "Succeeded", "2026-03-01T11:06:00Z", "2026-03-01T11:26:00Z"),
            attempt("publish", 0, "Succeeded", "2026-03-01T11:26:00Z", "2026-03-01T11:30:00Z"),
        ],
        "progress": {
            "step": 100,
            "totalSteps": 100,
            "loss": "0.8123",
            "evalLoss": "0.91",
            "initialEvalLoss": "2.31",
            "tokensPerSecond": "41250",
            "mfu": "0.41",
            "goodput": "0.97",
            "checkpointStep": 100,
            "summary": "100/100",
            "firstStepTime": "2026-03-01T10:07:00Z",
            "advancedTime": "2026-03-01T11:06:00Z",
        },
        "artifacts": [
            {"name": "adapter", "path": "pvc://results/tuned/adapter", "sha256": "b" * 64},
            {"name": "merged", "path": "pvc://results/tuned/merged", "sha256": "c" * 64},
        ],
    },
    number=1,
)
RUNNING = job(
    "running",
    {
        "observedGeneration": 1,
        "startTime": "2026-03-01T10:00:00Z",
        "attempt": 1,
        "conditions": stages(4, condition("Trained", "False", "Running"), condition("Ready", "True", "Running")),
        "attempts": [
            *_PREPARED,
            attempt("train", 0, "Failed", "2026-03-01T10:06:00Z", "2026-03-01T10:30:00Z", **_NODE_LOST, nodes=2, ranks=8),
            attempt("train", 1, "Running", "2026-03-01T10:31:00Z", nodes=1, ranks=4),
        ],
        "restarts": {"uncounted": 1, "inARow": 1},
        "progress": {
            "step": 60,
            "totalSteps": 200,
            "loss": "1.25",
            "evalLoss": "1.4",
            "initialEvalLoss": "2.31",
            "tokensPerSecond": "39800",
            "calculatedTokensPerSecond": "43780",
            "mfu": "0.385",
            "goodput": "0.88",
            "checkpointStep": 50,
            "summary": "60/200",
            "firstStepTime": "2026-03-01T11:00:00Z",
            "advancedTime": "2026-03-01T11:59:00Z",
        },
    },
    number=2,
)
FAILED = job(
    "failed",
    {
        "observedGeneration": 1,
        "startTime": "2026-03-01T10:00:00Z",
        "completionTime": "2026-03-01T10:21:00Z",
        "conditions": stages(
            4,
            condition("Trained", "False", "Failed", "DeviceOutOfMemory on rank 5: CUDA out of memory"),
            condition("Succeeded", "False", "Failed", "DeviceOutOfMemory on rank 5: CUDA out of memory"),
            condition("Finished", "True", "Failed", time="2026-03-01T10:21:00Z"),
        ),
        "attempts": [
            *_PREPARED,
            attempt("train", 0, "Failed", "2026-03-01T10:06:00Z", "2026-03-01T10:20:00Z", **_OUT_OF_MEMORY),
        ],
        "progress": {
            "step": 12,
            "totalSteps": 200,
            "loss": "2.1",
            "checkpointStep": 10,
            "summary": "12/200",
            "firstStepTime": "2026-03-01T10:10:00Z",
            "advancedTime": "2026-03-01T10:19:00Z",
        },
    },
    number=3,
)
STALLED = job(
    "stalled",
    {
        "observedGeneration": 1,
        "conditions": stages(
            0,
            condition("Validated", "False", "Refused", "1 error: txt-without-text"),
            condition("Stalled", "True", "Refused", "1 error: txt-without-text. Correct the manifest."),
        ),
        "findings": [
            {
                "rule": "txt-without-text",
                "severity": "error",
                "field": "spec.data.format",
                "value": "PromptCompletion",
                "message": "data.source is pvc://data/train.txt, and a .txt file holds text alone",
                "fix": "set data.format: Text, or name a file of JSON Lines .jsonl",
            }
        ],
    },
    number=4,
    data={"source": "pvc://data/train.txt"},
)
WAITING = job(
    "waiting",
    {
        "observedGeneration": 1,
        "startTime": "2026-03-01T11:00:00Z",
        "conditions": stages(
            4, condition("Trained", "Unknown", "Queued", "Workload team/waiting: no quota of nvidia.com/gpu is left")
        ),
        "attempts": [*_PREPARED, attempt("train", 0, "Running", "2026-03-01T11:10:00Z", runningTime="", scheduledTime="")],
    },
    number=5,
)
NEW = job("new", None, number=6)
ALL = (SUCCEEDED, RUNNING, FAILED, STALLED, WAITING, NEW)

HOSTILE = job(
    "hostile",
    {
        "observedGeneration": "many",
        "startTime": 7,
        "conditions": [
            {"type": "Trained"},
            3,
            condition("Stalled", "True", "Refused", "\x1b]0;owned\x07\x1b[2J\u202e" + "x" * 4000),
            {"type": ["Stalled"], "status": "True", "reason": "x", "lastTransitionTime": ""},
        ],
        "attempts": {"role": "train"},
        "progress": {"step": "12", "loss": "nan", "summary": "\x1b[31m1/2"},
        "findings": "none",
        "phase": "\x9b31m",
    },
    number=7,
)


def pod(job_document: Document, role: str, number: int, index: int = 0, phase: str = "Running", **state: Any) -> Document:
    name = job_document["metadata"]["name"]
    states = state or {"running": {"startedAt": "2026-03-01T10:31:00Z"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{role}-{number}-{index}",
            "namespace": "team",
            "uid": f"pod-{name}-{role}-{number}-{index}",
            "creationTimestamp": "2026-03-01T10:31:00Z",
            "labels": {
                "finetune.dev/job": name,
                "finetune.dev/job-uid": job_document["metadata"]["uid"],
                "finetune.dev/role": role,
                "finetune.dev/attempt": str(number),
                "batch.kubernetes.io/job-completion-index": str(index),
            },
        },
        "spec": {"nodeName": f"gpu-{index}", "containers": [{"name": "trainer", "env": [{"name": "TOKEN", "value": "hunter2"}]}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "trainer", "restartCount": 0, "state": states}]},
    }

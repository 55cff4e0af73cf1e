"""Jobs of a cluster as its API server holds them, written by hand: succeeded, running, failed, stalled, waiting, new."""

import copy
from datetime import UTC, datetime
from typing import Any

from tests.support.cases import table

Document = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SPEC: Document = table(__file__, "SPEC")
_PREPARED, _JOBS = table(__file__, "PREPARED"), table(__file__, "JOBS")
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


def _attempt(role: str, number: int, outcome: str, start: str, end: str = "", more: Document | None = None) -> Document:
    named = {"role": role, "number": number, "outcome": outcome, "startTime": start, "endTime": end}
    return {**named, "scheduledTime": start, "runningTime": start, **(more or {})}


def _stored(name: str, number: int) -> Document:
    """A job of the table."""
    row = _JOBS[name]
    status = dict(row.get("status", {}))
    if "done" in row:
        status["conditions"] = stages(row["done"], *(condition(*each) for each in row["conditions"]))
    if "attempts" in row:
        status["attempts"] = [_attempt(*each) for each in (*_PREPARED, *row["attempts"])]
    return job(name, status or None, number=number, **row.get("spec", {}))


ALL = SUCCEEDED, RUNNING, FAILED, STALLED, WAITING, NEW = tuple(_stored(name, number) for number, name in enumerate(_JOBS, 1))

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

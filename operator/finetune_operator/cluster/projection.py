"""Raw objects -> the small typed views that the cache keeps. Raw dicts of many jobs and pods would cost forty times the memory."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_job.names import (
    DEFAULT_PROFILE,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_ROLE,
    PLAN_KEY,
    Role,
)
from finetune_operator.cluster.kinds import Kind
from finetune_operator.decide.observed import BatchJobView, JobConditionView, PodView

Document = Mapping[str, Any]
UNREAD_METADATA = frozenset({"managedFields", "annotations", "labels", "resourceVersion"})
"""Not kept: an object in which only these changed is not looked at again. The version stands in the key."""
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class ObjectKey:
    """What every kept object is found and compared by."""

    uid: str
    namespace: str
    name: str
    version: int
    """resourceVersion; comparable as a number within one kind."""
    owner_uid: str
    """UID of the controller owner; empty without one."""
    owner_kind: str
    owner_name: str
    job_label: str
    """Name of the FineTuneJob by the object's own label: good enough to wake its reconciler, never to trust."""


@dataclass(frozen=True)
class Held:
    """One object of the cache."""

    key: ObjectKey
    compressed: bytes = b""
    """The parts of the object that are needed raw, as JSON: spec and status of our own kinds, the data of a ConfigMap."""
    batch_job: BatchJobView | None = None
    pod: PodView | None = None
    summary: JobSummary | None = None

    def document(self) -> dict[str, Any]:
        """The raw parts."""
        decoded: dict[str, Any] = json.loads(zlib.decompress(self.compressed))
        return decoded


@dataclass(frozen=True)
class JobSummary:
    """What metrics and polls need of a FineTuneJob without parsing it again."""

    profile: str
    phase: str
    conditions: tuple[tuple[str, str, str], ...]
    """Type, status, reason."""
    outcomes: tuple[tuple[str, str, bool], ...]
    """Of each recorded attempt: outcome, failure class (empty without one), whether it was counted."""
    attempt: int
    is_finished: bool
    is_training: bool
    """Prepared, not trained, not finished: rank 0 may have progress to tell."""


def timestamp(text: str | None) -> datetime | None:
    """An RFC 3339 time, or None for an absent one."""
    return datetime.fromisoformat(text) if text else None


def object_key(document: Document) -> ObjectKey:
    """Identity, version and controller owner."""
    metadata = document["metadata"]
    owners: list[Document] = [item for item in metadata.get("ownerReferences") or () if item.get("controller")]
    owner: Document = owners[0] if owners else {}
    return ObjectKey(
        uid=metadata["uid"],
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        version=int(metadata["resourceVersion"]),
        owner_uid=owner.get("uid", ""),
        owner_kind=owner.get("kind", ""),
        owner_name=owner.get("name", ""),
        job_label=(metadata.get("labels") or {}).get(LABEL_JOB, ""),
    )


def belongs_to(document: Document, job_uid: str) -> bool:
    """Whether an object is a child of that job.

    By its controller owner; a claim that outlives the job has none on purpose and is told by its label.
    """
    key = object_key(document)
    if key.owner_uid:
        return key.owner_uid == job_uid
    labelled = (document["metadata"].get("labels") or {}).get(LABEL_JOB_UID)
    is_claim = document.get("kind") == "PersistentVolumeClaim"
    return bool(is_claim and labelled == job_uid)


def project(kind: Kind, document: Document) -> Held:
    """What the cache keeps of an object."""
    key = object_key(document)
    match kind.name:
        case "FineTuneJob":
            return Held(key, _compressed(document, "metadata", "spec", "status"), summary=_summary(document))
        case "FineTuneProfile":
            return Held(key, _compressed(document, "metadata", "spec"))
        case "ConfigMap":
            return Held(key, zlib.compress(json.dumps({"plan": (document.get("data") or {}).get(PLAN_KEY, "")}).encode()))
        case "Job":
            return Held(key, batch_job=batch_job_view(document))
        case "Pod":
            return Held(key, pod=pod_view(document))
        case _:
            return Held(key)


def _compressed(document: Document, *parts: str) -> bytes:
    kept = {part: document[part] for part in parts if part in document}
    kept["metadata"] = {name: value for name, value in kept["metadata"].items() if name not in UNREAD_METADATA}
    return zlib.compress(json.dumps(kept, separators=(",", ":")).encode())


def _summary(document: Document) -> JobSummary:
    try:
        return _summary_of(document, document.get("status") or {})
    except (AttributeError, KeyError, TypeError):
        # No definition of ours lets such a status through; an object must not end the watch of all others.
        return _summary_of(document, {})


def _summary_of(document: Document, status: Document) -> JobSummary:
    conditions: dict[str, tuple[str, str]] = {
        item["type"]: (item["status"], item.get("reason", "")) for item in status.get("conditions") or ()
    }

    def holds(kind: str) -> bool:
        return conditions.get(kind, ("", ""))[0] == "True"

    return JobSummary(
        profile=(document.get("spec") or {}).get("profile") or DEFAULT_PROFILE,
        phase=status.get("phase") or "Pending",
        conditions=tuple((kind, state, reason) for kind, (state, reason) in conditions.items()),
        outcomes=tuple(
            (item.get("outcome", "Running"), item.get("failure") or "", bool(item.get("counted")))
            for item in status.get("attempts") or ()
        ),
        attempt=status.get("attempt") or 0,
        is_finished=holds("Finished"),
        is_training=holds("Prepared") and not holds("Trained") and not holds("Finished"),
    )


def _role_and_attempt(document: Document) -> tuple[Role, int] | None:
    labels = document["metadata"].get("labels") or {}
    try:
        return Role(labels[LABEL_ROLE]), int(labels[LABEL_ATTEMPT])
    except (KeyError, ValueError):
        return None


def batch_job_view(document: Document) -> BatchJobView | None:
    """A batch Job; None where its labels do not say what it is for."""
    metadata, status = document["metadata"], document.get("status") or {}
    place = _role_and_attempt(document)
    created = timestamp(metadata.get("creationTimestamp"))
    if place is None or created is None:
        return None
    return BatchJobView(
        name=metadata["name"],
        uid=metadata["uid"],
        role=place[0],
        attempt=place[1],
        created=created,
        conditions=tuple(
            JobConditionView(
                type=item["type"],
                reason=item.get("reason", ""),
                message=item.get("message", ""),
                since=timestamp(item.get("lastTransitionTime")),
            )
            for item in status.get("conditions") or ()
            if item.get("status") == "True"
        ),
        suspended=bool((document.get("spec") or {}).get("suspend")),
        start_time=timestamp(status.get("startTime")),
        deleting="deletionTimestamp" in metadata,
    )


def pod_view(document: Document) -> PodView | None:
    """A pod; None where its labels do not say what it is for."""
    metadata, status = document["metadata"], document.get("status") or {}
    place = _role_and_attempt(document)
    created = timestamp(metadata.get("creationTimestamp"))
    if place is None or created is None:
        return None
    state, waiting = _container_states(status)
    ended = state.get("terminated") or {}
    running = state.get("running") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    disrupted, scheduled = conditions.get("DisruptionTarget", {}), conditions.get("PodScheduled", {})
    index = (metadata.get("annotations") or {}).get(INDEX_LABEL) or (metadata.get("labels") or {}).get(INDEX_LABEL) or "0"
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        role=place[0],
        attempt=place[1],
        created=created,
        node_rank=int(index) if index.isdigit() else 0,
        phase=status.get("phase") or "Pending",
        deletion_requested=_deletion_requested(metadata),
        disruption=disrupted.get("reason", "") if disrupted.get("status") == "True" else "",
        started=timestamp(running.get("startedAt") or ended.get("startedAt")),
        finished=timestamp(ended.get("finishedAt")),
        exit_code=ended.get("exitCode"),
        reason=ended.get("reason") or status.get("reason") or "",
        termination_message=ended.get("message") or "",
        waiting_reason=waiting,
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else "",
        pod_ip=status.get("podIP") or "",
        node=(document.get("spec") or {}).get("nodeName") or "",
    )


def _container_states(status: Document) -> tuple[Document, str]:
    """The state of the container that matters, and why one waits: an init container that failed or waits hides the main one."""
    statuses = status.get("containerStatuses") or ()
    state: Document = (statuses[0].get("state") or {}) if statuses else {}
    for initial in status.get("initContainerStatuses") or ():
        begun = initial.get("state") or {}
        if (begun.get("terminated") or {}).get("exitCode"):
            state = begun
        elif "waiting" in begun:
            return state, begun["waiting"].get("reason", "")
    return state, (state.get("waiting") or {}).get("reason", "")


def _deletion_requested(metadata: Document) -> datetime | None:
    deadline = timestamp(metadata.get("deletionTimestamp"))
    return None if deadline is None else deadline - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)


def utc_now() -> datetime:
    """Now, aware and in UTC."""
    return datetime.now(UTC)

"""Converts raw objects to the small typed views that the cache keeps. Raw dicts of many jobs and pods would cost forty times
the memory.

Whatever an object contains, this raises only `UnreadableObjectError`, for one without a readable identity. Other values that
cannot be read count as absent, and `CachedObject.unreadable` names them. The length of every text is limited.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_job.failures import TERMINATION_LIMIT_BYTES
from finetune_job.names import INDEX_LABEL, LABEL_ATTEMPT, PLAN_KEY, Role
from finetune_operator.children.placement import GATES_ANNOTATION
from finetune_operator.children.pod_template import CONTAINER_NAME
from finetune_operator.cluster.kinds import BATCH_JOBS, Kind
from finetune_operator.cluster.object_key import Document, ObjectKey, key_of
from finetune_operator.cluster.packing import packed, unpacked
from finetune_operator.cluster.raw_objects import Fields
from finetune_operator.cluster.summaries import LONGEST_REASON, JobSummary, ProfileSummary, job_summary, profile_summary
from finetune_operator.decide.children_seen import BatchJobView, ContainerEnd, JobConditionView, PodView

LONGEST_MESSAGE = 2048
LONGEST_GATES = 4096
LONGEST_GRACE_SECONDS = 366 * 86_400
DEEPEST = 64
"""Levels of nesting of a manifest that are read. Ours have ten, and recursion over a thousand would exhaust the stack of a
pass."""
_BATCH_JOB_NAME = re.compile(r".+-(fetch|preflight|train|merge|publish)-([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class CachedObject:
    """One object of the cache."""

    key: ObjectKey
    compressed: bytes = b""
    """The parts of the object that are needed raw, as JSON: spec and status of our own kinds, the data of a ConfigMap."""
    size: int = 0
    """Bytes of these parts before compression."""
    batch_job: BatchJobView | None = None
    pod: PodView | None = None
    summary: JobSummary | None = None
    profile: ProfileSummary | None = None
    is_bare: bool = False
    """Whether only the key was read, because the object claims to be ours but its owner is not known (yet)."""
    unreadable: tuple[str, ...] = field(default=(), compare=False)
    """Paths of values that could not be read and are taken for absent."""

    @property
    def is_gone(self) -> bool:
        """Whether it is kept as evidence only: a pod that was deleted."""
        return self.pod is not None and self.pod.gone

    def document(self) -> dict[str, Any]:
        """The raw parts."""
        return unpacked(self.compressed)


def utc_now() -> datetime:
    """Now, aware and in UTC."""
    return datetime.now(UTC)


def project(kind: Kind, document: Document) -> CachedObject:
    """Return what the cache keeps of an object. Raises UnreadableObjectError."""
    fields = Fields(document)
    key = key_of(fields)
    match kind.name:
        case "FineTuneJob":
            summary = job_summary(fields)
            return CachedObject(key, *_compressed(fields, document, "spec", "status"), summary=summary, unreadable=fields.notes)
        case "FineTuneProfile":
            profile = profile_summary(fields.at("spec"))
            return CachedObject(key, *_compressed(fields, document, "spec", "status"), profile=profile, unreadable=fields.notes)
        case "ConfigMap":
            plan = fields.at("data").text(PLAN_KEY, 2**20)
            return CachedObject(key, *packed({"plan": plan}), unreadable=fields.notes)
        case "Job":
            return CachedObject(key, batch_job=_batch_job_view(key, fields), unreadable=fields.notes)
        case "Pod":
            return CachedObject(key, pod=_pod_view(key, fields), unreadable=fields.notes)
        case _:
            return CachedObject(key)


def _compressed(fields: Fields, document: Document, *parts: str) -> tuple[bytes, int]:
    """Compress these parts and the metadata that is used, so that a change of other metadata is no news."""
    kept: dict[str, Any] = {}
    for part in parts:
        value = document.get(part)
        if isinstance(value, dict) and not _is_deeper(value, DEEPEST):
            kept[part] = value
        elif value is not None:
            kept[part] = None
            fields.note(part)
    metadata = document["metadata"]
    kept["metadata"] = {
        name: metadata[name]
        for name in ("namespace", "name", "uid", "generation", "creationTimestamp", "deletionTimestamp", "finalizers")
        if name in metadata
    }
    return packed(kept)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper. It is found without recursion."""
    layer = [value]
    while layer and levels:
        inner = [item for outer in layer for item in (outer.values() if isinstance(outer, dict) else outer)]
        layer = [item for item in inner if isinstance(item, dict | list)]
        levels -= 1
    return bool(layer)


def _role_and_attempt(batch_job_name: str) -> tuple[Role, int] | None:
    """Read role and attempt from the name of the Job, which cannot be changed, unlike its labels."""
    match = _BATCH_JOB_NAME.fullmatch(batch_job_name)
    return None if match is None else (Role(match[1]), int(match[2]))


def batch_job_view(document: Document) -> BatchJobView | None:
    """A batch Job; None where its name does not say what it is for. Raises UnreadableObjectError."""
    fields = Fields(document)
    return _batch_job_view(key_of(fields), fields)


def _batch_job_view(key: ObjectKey, fields: Fields) -> BatchJobView | None:
    metadata, status = fields.at("metadata"), fields.at("status")
    place = _role_and_attempt(key.name)
    created = metadata.time("creationTimestamp")
    if place is None or created is None:
        return None
    return BatchJobView(
        name=key.name,
        uid=key.uid,
        role=place[0],
        attempt=place[1],
        created=created,
        conditions=tuple(
            JobConditionView(
                type=item.text("type", LONGEST_REASON),
                reason=item.text("reason", LONGEST_REASON),
                message=item.text("message", LONGEST_MESSAGE),
                since=item.time("lastTransitionTime"),
            )
            for item in status.items("conditions")
            if item.text("status", 16) == "True"
        ),
        suspended=fields.at("spec").flag("suspend"),
        parallelism=fields.at("spec").integer("parallelism"),
        restarts_container=_restarts_container(fields.at("spec").at("template").at("spec")),
        admission_gates=_gates(metadata.at("annotations").name(GATES_ANNOTATION, LONGEST_GATES)),
        start_time=status.time("startTime"),
        deleting=metadata.has("deletionTimestamp"),
    )


def _gates(text: str) -> tuple[str, ...]:
    return tuple(gate for gate in (part.strip() for part in text.split(",")) if gate)


def pod_view(document: Document) -> PodView | None:
    """A pod; None where the name of its Job does not say what it is for. Raises UnreadableObjectError."""
    fields = Fields(document)
    return _pod_view(key_of(fields), fields)


def _pod_view(key: ObjectKey, fields: Fields) -> PodView | None:
    metadata, status = fields.at("metadata"), fields.at("status")
    place = _role_and_attempt(key.owner_name) if key.is_controlled_by(BATCH_JOBS) else None
    created = metadata.time("creationTimestamp")
    if place is None or created is None:
        return None
    state, waiting = _container_states(status)
    restarts, earlier = _restarts(_own_container(status))
    ended, running = state.at("terminated"), state.at("running")
    conditions = {item.text("type", LONGEST_REASON): item for item in status.items("conditions")}
    disrupted, scheduled, prepared = (
        conditions.get(kind, Fields(None)) for kind in ("DisruptionTarget", "PodScheduled", "PodReadyToStartContainers")
    )
    index = metadata.at("annotations").digits(INDEX_LABEL)
    return PodView(
        name=key.name,
        uid=key.uid,
        role=place[0],
        attempt=place[1],
        created=created,
        node_rank=(metadata.at("labels").digits(INDEX_LABEL) if index is None else index) or 0,
        phase=status.text("phase", 32) or "Pending",
        deletion_requested=_deletion_requested(metadata),
        deletion_due=metadata.time("deletionTimestamp"),
        scheduled=scheduled.time("lastTransitionTime") if scheduled.text("status", 16) == "True" else None,
        prepared=prepared.time("lastTransitionTime") if prepared.text("status", 16) == "True" else None,
        disruption=disrupted.text("reason", LONGEST_REASON) if disrupted.text("status", 16) == "True" else "",
        started=running.time("startedAt") or ended.time("startedAt"),
        finished=ended.time("finishedAt"),
        exit_code=ended.integer("exitCode"),
        reason=ended.text("reason", LONGEST_REASON) or status.text("reason", LONGEST_REASON),
        eviction=status.text("message", LONGEST_MESSAGE) if status.text("reason", LONGEST_REASON) == "Evicted" else "",
        termination_message=ended.last_of_text("message", TERMINATION_LIMIT_BYTES),
        restarts=restarts,
        earlier=earlier,
        label_attempt=metadata.at("labels").digits(LABEL_ATTEMPT),
        waiting_reason=waiting.text("reason", LONGEST_REASON),
        waiting_message=waiting.text("message", LONGEST_MESSAGE),
        unschedulable=scheduled.text("message", LONGEST_MESSAGE) if scheduled.text("status", 16) == "False" else "",
        pod_ip=status.name("podIP", 64),
        node=fields.at("spec").name("nodeName"),
    )


def _own_container(status: Fields) -> Fields:
    """The status of our container."""
    containers = {item.name("name"): item for item in status.items("containerStatuses")}
    # The kubelet sorts by name, so that a container which somebody injected may come first.
    return containers.get(CONTAINER_NAME) or next(iter(containers.values()), Fields(None))


def _container_states(status: Fields) -> tuple[Fields, Fields]:
    """The state of our container, and the one in which a container waits: an init container counts as ours until that runs."""
    state = _own_container(status).at("state")
    if state.has("running") or state.has("terminated"):
        return state, Fields(None)
    for initial in status.items("initContainerStatuses"):
        begun = initial.at("state")
        if begun.at("terminated").integer("exitCode"):
            state = begun
        elif begun.has("waiting"):
            return state, begun.at("waiting")
    return state, state.at("waiting")


def _restarts(container: Fields) -> tuple[int, ContainerEnd | None]:
    """How often a container was restarted, or waits to be, and how it ended before."""
    ended = container.at("lastState").at("terminated")
    if not ended.raw:
        return 0, None
    end = ContainerEnd(
        started=ended.time("startedAt"),
        finished=ended.time("finishedAt"),
        exit_code=ended.integer("exitCode"),
        reason=ended.text("reason", LONGEST_REASON),
        termination_message=ended.last_of_text("message", TERMINATION_LIMIT_BYTES),
    )
    # The kubelet counts a container only once it is there.
    waits = container.at("state").has("waiting")
    return max(container.integer("restartCount") or 0, 0) + waits, end


def _restarts_container(pod: Fields) -> bool:
    """Whether our container has restart rules. An API server that does not know them drops the field."""
    return any(item.name("name") == CONTAINER_NAME and item.has("restartPolicyRules") for item in pod.items("containers"))


def _deletion_requested(metadata: Fields) -> datetime | None:
    deadline, grace = metadata.time("deletionTimestamp"), metadata.integer("deletionGracePeriodSeconds") or 0
    return None if deadline is None else deadline - timedelta(seconds=min(max(grace, 0), LONGEST_GRACE_SECONDS))

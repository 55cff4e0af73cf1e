"""Converts raw objects to the small typed views that the cache keeps.

Whatever an object contains, the only error raised is `UnreadableObjectError`, for an object without a readable identity. Other
unreadable values count as absent and are listed in `CachedObject.unreadable`. The length of every string is limited.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_job.failures import TERMINATION_LIMIT_BYTES
from finetune_job.names import INDEX_LABEL, PLAN_KEY, Role
from finetune_operator.cache.summaries import LONGEST_REASON, JobSummary, ProfileSummary, job_summary, profile_summary
from finetune_operator.children.placement import GATES_ANNOTATION
from finetune_operator.children.pod_template import CONTAINER_NAME
from finetune_operator.client.kinds import BATCH_JOBS, Kind
from finetune_operator.client.object_key import Document, ObjectKey, key_of
from finetune_operator.client.raw_objects import Fields
from finetune_operator.decide.seen.children_seen import BatchJobView, JobConditionView, PodView

LONGEST_MESSAGE = 2048
LONGEST_GATES = 4096
LONGEST_GRACE_SECONDS = 366 * 86_400
DEEPEST = 64
"""Maximum nesting depth of a manifest that is still read. Our manifests have ten levels, and recursion over a thousand levels
would exhaust the stack of a pass."""
_BATCH_JOB_NAME = re.compile(r".+-(fetch|preflight|train|merge|publish)-([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class CachedObject:
    """One object of the cache."""

    key: ObjectKey
    content: bytes = b""
    """For our own kinds, the parts that are needed in raw form, as JSON: spec, status and some metadata."""
    plan: str = ""
    """The plan in a ConfigMap."""
    batch_job: BatchJobView | None = None
    pod: PodView | None = None
    summary: JobSummary | None = None
    profile: ProfileSummary | None = None
    unreadable: tuple[str, ...] = field(default=(), compare=False)
    """Paths of values that could not be read and are treated as absent."""

    @property
    def is_gone(self) -> bool:
        """Whether this is a deleted pod, which is kept only as evidence."""
        return self.pod is not None and self.pod.gone

    def document(self) -> dict[str, Any]:
        """Parse the raw parts in `content`."""
        document: dict[str, Any] = json.loads(self.content)
        return document


def utc_now() -> datetime:
    """Return the current time as a timezone-aware datetime in UTC."""
    return datetime.now(UTC)


def project(kind: Kind, document: Document) -> CachedObject:
    """Return the form in which the cache keeps an object. Raises UnreadableObjectError."""
    fields = Fields(document)
    key = key_of(fields)
    match kind.name:
        case "FineTuneJob":
            summary = job_summary(fields)
            return CachedObject(key, _content(fields, document), summary=summary, unreadable=fields.notes)
        case "FineTuneProfile":
            profile = profile_summary(fields.at("spec"))
            return CachedObject(key, _content(fields, document), profile=profile, unreadable=fields.notes)
        case "ConfigMap":
            plan = fields.at("data").text(PLAN_KEY, 2**20)
            return CachedObject(key, plan=plan, unreadable=fields.notes)
        case "Job":
            return CachedObject(key, batch_job=_batch_job_view(key, fields), unreadable=fields.notes)
        case "Pod":
            return CachedObject(key, pod=_pod_view(key, fields), unreadable=fields.notes)
        case _:
            return CachedObject(key)


def _content(fields: Fields, document: Document) -> bytes:
    """Return spec, status and the metadata that is used. So a change of other metadata does not cause a pass."""
    kept: dict[str, Any] = {}
    for part in ("spec", "status"):
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
    return json.dumps(kept, separators=(",", ":")).encode()


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested more than `levels` deep. Does not recurse."""
    layer = [value]
    while layer and levels:
        inner = [item for outer in layer for item in (outer.values() if isinstance(outer, dict) else outer)]
        layer = [item for item in inner if isinstance(item, dict | list)]
        levels -= 1
    return bool(layer)


def _role_and_attempt(batch_job_name: str) -> tuple[Role, int] | None:
    """Parse role and attempt from the name of the Job, which, unlike its labels, cannot be changed."""
    match = _BATCH_JOB_NAME.fullmatch(batch_job_name)
    return None if match is None else (Role(match[1]), int(match[2]))


def batch_job_view(document: Document) -> BatchJobView | None:
    """The view of a batch Job; None if it has no role in its name or no creation time. Raises UnreadableObjectError."""
    fields = Fields(document)
    return _batch_job_view(key_of(fields), fields)


def _batch_job_view(key: ObjectKey, fields: Fields) -> BatchJobView | None:
    metadata, status = fields.at("metadata"), fields.at("status")
    place = _role_and_attempt(key.name)
    created = metadata.time("creationTimestamp")
    if place is None or created is None:
        return None
    gates = metadata.at("annotations").name(GATES_ANNOTATION, LONGEST_GATES)
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
        admission_gates=tuple(gate for gate in map(str.strip, gates.split(",")) if gate),
        start_time=status.time("startTime"),
        deleting=metadata.has("deletionTimestamp"),
    )


def pod_view(document: Document) -> PodView | None:
    """The view of a pod; None if it has no creation time, or if its Job's name has no role. Raises UnreadableObjectError."""
    fields = Fields(document)
    return _pod_view(key_of(fields), fields)


def _pod_view(key: ObjectKey, fields: Fields) -> PodView | None:
    metadata, status = fields.at("metadata"), fields.at("status")
    place = _role_and_attempt(key.owner_name) if key.is_controlled_by(BATCH_JOBS) else None
    created = metadata.time("creationTimestamp")
    if place is None or created is None:
        return None
    state, waiting = _container_states(status)
    ended, running = state.at("terminated"), state.at("running")
    conditions = {item.text("type", LONGEST_REASON): item for item in status.items("conditions")}
    disrupted, scheduled, prepared = (
        conditions.get(kind, Fields(None)) for kind in ("DisruptionTarget", "PodScheduled", "PodReadyToStartContainers")
    )
    index = metadata.at("annotations").digits(INDEX_LABEL)
    due, grace = metadata.time("deletionTimestamp"), metadata.integer("deletionGracePeriodSeconds") or 0
    return PodView(
        name=key.name,
        uid=key.uid,
        role=place[0],
        attempt=place[1],
        created=created,
        node_rank=(metadata.at("labels").digits(INDEX_LABEL) if index is None else index) or 0,
        phase=status.text("phase", 32) or "Pending",
        deletion_requested=None if due is None else due - timedelta(seconds=min(max(grace, 0), LONGEST_GRACE_SECONDS)),
        deletion_due=due,
        scheduled=scheduled.time("lastTransitionTime") if scheduled.text("status", 16) == "True" else None,
        prepared=prepared.time("lastTransitionTime") if prepared.text("status", 16) == "True" else None,
        disruption=disrupted.text("reason", LONGEST_REASON) if disrupted.text("status", 16) == "True" else "",
        started=running.time("startedAt") or ended.time("startedAt"),
        finished=ended.time("finishedAt"),
        exit_code=ended.integer("exitCode"),
        reason=ended.text("reason", LONGEST_REASON) or status.text("reason", LONGEST_REASON),
        eviction=status.text("message", LONGEST_MESSAGE) if status.text("reason", LONGEST_REASON) == "Evicted" else "",
        termination_message=ended.last_of_text("message", TERMINATION_LIMIT_BYTES),
        waiting_reason=waiting.text("reason", LONGEST_REASON),
        waiting_message=waiting.text("message", LONGEST_MESSAGE),
        unschedulable=scheduled.text("message", LONGEST_MESSAGE) if scheduled.text("status", 16) == "False" else "",
        pod_ip=status.name("podIP", 64),
        node=fields.at("spec").name("nodeName"),
    )


def _container_states(status: Fields) -> tuple[Fields, Fields]:
    """Return the state of our container (or of a failed init container), and the `waiting` state that holds up the pod."""
    containers = {item.name("name"): item for item in status.items("containerStatuses")}
    # The kubelet sorts containers by name, so one that a webhook injected may come first.
    state = (containers.get(CONTAINER_NAME) or next(iter(containers.values()), Fields(None))).at("state")
    if state.has("running") or state.has("terminated"):
        return state, Fields(None)
    for initial in status.items("initContainerStatuses"):
        begun = initial.at("state")
        if begun.at("terminated").integer("exitCode"):
            state = begun
        elif begun.has("waiting"):
            return state, begun.at("waiting")
    return state, state.at("waiting")

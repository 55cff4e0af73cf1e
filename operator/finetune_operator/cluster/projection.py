"""Raw objects -> the small typed views that the cache keeps. Raw dicts of many jobs and pods would cost forty times the memory.

Whatever stands in an object, nothing here raises but `UnreadableObjectError`, for one without a readable identity; other values
that cannot be read are as good as absent, and `Held.unreadable` names them. Every text is bounded.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_job.names import DEFAULT_PROFILE, LABEL_JOB_UID, LABEL_MANAGED_BY, MANAGED_BY, PLAN_KEY, Role
from finetune_operator.children.pod_template import CONTAINER_NAME
from finetune_operator.cluster.fields import Fields
from finetune_operator.cluster.kinds import BATCH_JOBS, JOBS, Kind
from finetune_operator.decide.observed import BatchJobView, JobConditionView, PodView

Document = Mapping[str, Any]
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
LONGEST_UID = 64
LONGEST_REASON = 256
LONGEST_MESSAGE = 2048
TERMINATION_MESSAGE = 4096
"""What the kubelet keeps of it: its last bytes."""
LONGEST_GRACE_SECONDS = 366 * 86_400
DEEPEST = 64
"""Levels of a manifest that are looked at. Ours have ten, and what recurses over a thousand of them costs a pass its stack."""
_BATCH_JOB_NAME = re.compile(r".+-(fetch|preflight|train|merge|publish)-([0-9]{1,9})")


class UnreadableObjectError(Exception):
    """An object without a UID, a name or a version that can be read."""


@dataclass(frozen=True)
class ObjectKey:
    """What every kept object is found and compared by."""

    uid: str
    namespace: str
    name: str
    version: int
    """resourceVersion; comparable as a number within one kind."""
    owner_uid: str = ""
    """UID of the controller owner; empty without one."""
    owner_kind: str = ""
    owner_group: str = ""
    owner_name: str = ""
    is_labelled: bool = True
    """Whether it carries the label by which children are watched; the events of one without it never come."""

    def is_controlled_by(self, kind: Kind) -> bool:
        """Whether its controller owner says that it is of that kind."""
        return bool(self.owner_uid) and self.owner_kind == kind.name and self.owner_group == kind.group


@dataclass(frozen=True)
class Held:
    """One object of the cache."""

    key: ObjectKey
    compressed: bytes = b""
    """The parts of the object that are needed raw, as JSON: spec and status of our own kinds, the data of a ConfigMap."""
    batch_job: BatchJobView | None = None
    pod: PodView | None = None
    summary: JobSummary | None = None
    unreadable: tuple[str, ...] = ()
    """Paths of values that could not be read and are taken for absent."""

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


def utc_now() -> datetime:
    """Now, aware and in UTC."""
    return datetime.now(UTC)


def object_key(document: Document) -> ObjectKey:
    """Identity, version and controller owner. Raises UnreadableObjectError."""
    return _object_key(Fields(document))


def _object_key(fields: Fields) -> ObjectKey:
    metadata = fields.at("metadata")
    uid, name, version = metadata.name("uid", LONGEST_UID), metadata.name("name"), metadata.digits("resourceVersion")
    if not uid or not name or version is None:
        raise UnreadableObjectError("metadata.uid, metadata.name or metadata.resourceVersion")
    owner = next((item for item in metadata.items("ownerReferences") if item.flag("controller")), Fields(None))
    owner_uid = owner.name("uid", LONGEST_UID)
    return ObjectKey(
        uid=uid,
        namespace=metadata.name("namespace"),
        name=name,
        version=version,
        owner_uid=owner_uid,
        owner_kind=owner.name("kind") if owner_uid else "",
        owner_group=owner.name("apiVersion").rpartition("/")[0] if owner_uid else "",
        owner_name=owner.name("name") if owner_uid else "",
        is_labelled=metadata.at("labels").text(LABEL_MANAGED_BY, 64) == MANAGED_BY,
    )


def belongs_to(document: Document, job_uid: str) -> bool:
    """Whether an object is a child of that job.

    By its controller owner; a claim that outlives the job has none on purpose and is told by its label.
    """
    key = object_key(document)
    if key.owner_uid:
        return key.owner_uid == job_uid and key.is_controlled_by(JOBS)
    is_claim = document.get("kind") == "PersistentVolumeClaim"
    return is_claim and labelled_job_uid(document) == job_uid


def labelled_job_uid(document: Document) -> str:
    """UID of the FineTuneJob by the object's own label, which anybody may write."""
    return Fields(document).at("metadata").at("labels").name(LABEL_JOB_UID, LONGEST_UID)


def project(kind: Kind, document: Document) -> Held:
    """What the cache keeps of an object. Raises UnreadableObjectError."""
    fields = Fields(document)
    key = _object_key(fields)
    match kind.name:
        case "FineTuneJob":
            summary = _summary(fields)
            return Held(key, _compressed(fields, document, "spec", "status"), summary=summary, unreadable=fields.notes)
        case "FineTuneProfile":
            return Held(key, _compressed(fields, document, "spec"), unreadable=fields.notes)
        case "ConfigMap":
            plan = fields.at("data").text(PLAN_KEY, 2**20)
            return Held(key, zlib.compress(json.dumps({"plan": plan}).encode()), unreadable=fields.notes)
        case "Job":
            return Held(key, batch_job=_batch_job_view(key, fields), unreadable=fields.notes)
        case "Pod":
            return Held(key, pod=_pod_view(key, fields), unreadable=fields.notes)
        case _:
            return Held(key)


def _compressed(fields: Fields, document: Document, *parts: str) -> bytes:
    """Of metadata only what is read: an object in which nothing else changed is not looked at again."""
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
        for name in ("namespace", "name", "uid", "generation", "creationTimestamp", "deletionTimestamp")
        if name in metadata
    }
    return zlib.compress(json.dumps(kept, separators=(",", ":")).encode())


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper, without recursion."""
    layer = [value]
    while layer and levels:
        inner = [item for outer in layer for item in (outer.values() if isinstance(outer, dict) else outer)]
        layer = [item for item in inner if isinstance(item, dict | list)]
        levels -= 1
    return bool(layer)


def _summary(fields: Fields) -> JobSummary:
    status = fields.at("status")
    conditions: dict[str, tuple[str, str]] = {
        item.text("type", LONGEST_REASON): (item.text("status", 16), item.text("reason", LONGEST_REASON))
        for item in status.items("conditions")
    }

    def holds(kind: str) -> bool:
        return conditions.get(kind, ("", ""))[0] == "True"

    return JobSummary(
        profile=fields.at("spec").name("profile") or DEFAULT_PROFILE,
        phase=status.text("phase", LONGEST_REASON) or "Pending",
        conditions=tuple((kind, state, reason) for kind, (state, reason) in conditions.items()),
        outcomes=tuple(
            (item.text("outcome", 32) or "Running", item.text("failure", 64), item.flag("counted"))
            for item in status.items("attempts")
        ),
        attempt=status.integer("attempt") or 0,
        is_finished=holds("Finished"),
        is_training=holds("Prepared") and not holds("Trained") and not holds("Finished"),
    )


def _role_and_attempt(batch_job_name: str) -> tuple[Role, int] | None:
    """From the name of the Job, which we gave it and nobody can change, unlike its labels."""
    match = _BATCH_JOB_NAME.fullmatch(batch_job_name)
    return None if match is None else (Role(match[1]), int(match[2]))


def batch_job_view(document: Document) -> BatchJobView | None:
    """A batch Job; None where its name does not say what it is for. Raises UnreadableObjectError."""
    fields = Fields(document)
    return _batch_job_view(_object_key(fields), fields)


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
        start_time=status.time("startTime"),
        deleting=metadata.has("deletionTimestamp"),
    )


def pod_view(document: Document) -> PodView | None:
    """A pod; None where the name of its Job does not say what it is for. Raises UnreadableObjectError."""
    fields = Fields(document)
    return _pod_view(_object_key(fields), fields)


def _pod_view(key: ObjectKey, fields: Fields) -> PodView | None:
    metadata, status = fields.at("metadata"), fields.at("status")
    place = _role_and_attempt(key.owner_name) if key.is_controlled_by(BATCH_JOBS) else None
    created = metadata.time("creationTimestamp")
    if place is None or created is None:
        return None
    state, waiting = _container_states(status)
    ended, running = state.at("terminated"), state.at("running")
    conditions = {item.text("type", LONGEST_REASON): item for item in status.items("conditions")}
    disrupted, scheduled = conditions.get("DisruptionTarget", Fields(None)), conditions.get("PodScheduled", Fields(None))
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
        disruption=disrupted.text("reason", LONGEST_REASON) if disrupted.text("status", 16) == "True" else "",
        started=running.time("startedAt") or ended.time("startedAt"),
        finished=ended.time("finishedAt"),
        exit_code=ended.integer("exitCode"),
        reason=ended.text("reason", LONGEST_REASON) or status.text("reason", LONGEST_REASON),
        termination_message=ended.last_of_text("message", TERMINATION_MESSAGE),
        waiting_reason=waiting,
        unschedulable=scheduled.text("message", LONGEST_MESSAGE) if scheduled.text("status", 16) == "False" else "",
        pod_ip=status.name("podIP", 64),
        node=fields.at("spec").name("nodeName"),
    )


def _container_states(status: Fields) -> tuple[Fields, str]:
    """The state of our container, and why one waits: until it runs, an init container that failed or waits stands for it."""
    states = {item.name("name"): item.at("state") for item in status.items("containerStatuses")}
    # The kubelet sorts by name, so that a container which somebody injected may come first.
    state = states.get(CONTAINER_NAME) or next(iter(states.values()), Fields(None))
    if state.has("running") or state.has("terminated"):
        return state, ""
    for initial in status.items("initContainerStatuses"):
        begun = initial.at("state")
        if begun.at("terminated").integer("exitCode"):
            state = begun
        elif begun.has("waiting"):
            return state, begun.at("waiting").text("reason", LONGEST_REASON)
    return state, state.at("waiting").text("reason", LONGEST_REASON)


def _deletion_requested(metadata: Fields) -> datetime | None:
    deadline, grace = metadata.time("deletionTimestamp"), metadata.integer("deletionGracePeriodSeconds") or 0
    return None if deadline is None else deadline - timedelta(seconds=min(max(grace, 0), LONGEST_GRACE_SECONDS))

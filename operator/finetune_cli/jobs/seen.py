"""Jobs, pods and events as they were seen in a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from finetune_cli.jobs import documents
from finetune_job.api.status import Attempt, FineTuneJobStatus
from finetune_job.conditions import job_phase
from finetune_job.names import DEFAULT_PROFILE, INDEX_LABEL, LABEL_ATTEMPT, LABEL_ROLE, LABEL_TEAM, Role, batch_job_name
from finetune_job.reasons import Phase
from finetune_job.stored_status import read_status

ENDED_PHASES = (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)
NOT_SEEN = Phase.PENDING
"""Phase of a job that no operator has looked at yet."""


@dataclass(frozen=True)
class SeenObject:
    """An object read from the API server; its content may be anything."""

    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        return documents.text(self.document, "metadata", "name")

    @property
    def uid(self) -> str:
        return documents.text(self.document, "metadata", "uid")

    @property
    def created(self) -> datetime | None:
        return documents.moment(documents.text(self.document, "metadata", "creationTimestamp"))

    @property
    def labels(self) -> dict[str, str]:
        return documents.texts(self.document, "metadata", "labels")


@dataclass(frozen=True)
class SeenJob(SeenObject):
    """A FineTuneJob."""

    status: FineTuneJobStatus
    unreadable: tuple[str, ...] = ()
    """Fields of the status that could not be read, and are therefore treated as absent."""
    is_on_cpu: bool = False
    """Whether the job's profile is known to name no GPU."""
    context: str | None = None
    """Context of the kubeconfig that the user named; None: the current one."""

    @property
    def namespace(self) -> str:
        return documents.text(self.document, "metadata", "namespace")

    @property
    def title(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Options with which any command finds the job."""
        return place_flags(self.namespace, self.context)

    def command(self, verb: str, *more: str) -> str:
        """Return a shell command about this job that works wherever it is typed."""
        subject = f"job/{self.name}" if verb == "explain" else self.name
        return shlex.join(["finetune", verb, subject, *self.flags, *more])

    @property
    def resource_version(self) -> str:
        """Version of the object, which changes with every write."""
        return documents.text(self.document, "metadata", "resourceVersion")

    @property
    def generation(self) -> int:
        """Number that grows with each change of the spec."""
        return documents.number(self.document, "metadata", "generation") or 0

    @property
    def team(self) -> str:
        """The team that is charged for the job."""
        return self.labels.get(LABEL_TEAM) or self.namespace

    @property
    def spec(self) -> Mapping[str, Any]:
        return documents.part(self.document, "spec")

    @property
    def profile(self) -> str:
        """Name of the job's profile."""
        return documents.text(self.spec, "profile") or DEFAULT_PROFILE

    def with_profile(self, profile: Mapping[str, Any] | None) -> SeenJob:
        """Return the job with `is_on_cpu` set according to its profile; None: the profile could not be read."""
        return replace(self, is_on_cpu=profile is not None and documents.value(profile, "spec", "gpu") is None)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all training pods together; each rank has one device."""
        return self.num_nodes * max(documents.number(self.spec, "parallelism", "processesPerNode") or 1, 1)

    @property
    def phase(self) -> str:
        """The phase of the job, in one word."""
        return str(job_phase(self.status.conditions) if self.status.conditions else NOT_SEEN)

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED_PHASES

    @property
    def started(self) -> datetime | None:
        """When the job's plan was frozen."""
        return documents.moment(self.status.start_time)

    @property
    def num_nodes(self) -> int:
        """Number of pods of the gang."""
        return max(documents.number(self.spec, "parallelism", "nodes") or 1, 1)

    @property
    def batch_jobs(self) -> frozenset[str]:
        """Names of the batch Jobs of the attempts that the status lists."""
        return frozenset(
            batch_job_name(self.name, attempt.role, attempt.number, self.num_nodes) for attempt in self.status.attempts
        )

    def attempts_of(self, role: Role) -> list[Attempt]:
        """Return the attempts of a role that the status lists, oldest first."""
        return [attempt for attempt in self.status.attempts if attempt.role is role]


def place_flags(namespace: str, context: str | None) -> tuple[str, ...]:
    """Return options that name a namespace and, if the user named one, a context."""
    return ("-n", namespace, *(() if context is None else ("--context", context)))


def seen_job(document: Mapping[str, Any]) -> SeenJob:
    """Return a job whose status may hold anything: fields that cannot be read are left out, and named in `unreadable`."""
    content = dict(documents.part(document, "status"))
    if _can_be_read(content):
        return SeenJob(document, read_status(content))
    kept: dict[str, Any] = {}
    for key, value in content.items():
        # If the value is a list, its readable elements are kept.
        readable = [each for each in value if _can_be_read({key: [each]})] if isinstance(value, list) else None
        for candidate in (value, readable):
            if candidate is not None and key not in kept and _can_be_read({key: candidate}):
                kept[key] = candidate
    unreadable = tuple(sorted(key for key in content if kept.get(key) != content[key]))
    return SeenJob(document, read_status(kept), unreadable)


def _can_be_read(status: dict[str, Any]) -> bool:
    try:
        read_status(status)
    except (ValidationError, TypeError, AttributeError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class SeenContainer:
    """The state of one container, as its pod's status has it."""

    state: str
    """`running`, `waiting`, `terminated`, or empty."""
    reason: str
    message: str
    exit_code: int | None


@dataclass(frozen=True)
class SeenPod(SeenObject):
    """A pod of a job."""

    containers: tuple[SeenContainer, ...]

    @property
    def role(self) -> str:
        """A `Role`, or the name of a role of another release."""
        return self.labels.get(LABEL_ROLE, "")

    @property
    def attempt(self) -> int:
        return _whole(self.labels.get(LABEL_ATTEMPT, ""))

    @property
    def node_rank(self) -> int:
        """Place of a training pod in the gang; 0 for pods of other roles."""
        return _whole(self.labels.get(INDEX_LABEL, ""))

    @property
    def node(self) -> str:
        """The pod's node; empty: it has no node yet."""
        return documents.text(self.document, "spec", "nodeName")

    @property
    def phase(self) -> str:
        return documents.text(self.document, "status", "phase")

    @property
    def has_logs(self) -> bool:
        """Whether at least one container of the pod has run."""
        return any(container.state in ("running", "terminated") for container in self.containers)


def seen_pod(document: Mapping[str, Any]) -> SeenPod:
    """Return a pod whose status may hold anything."""
    containers = []
    for container in documents.elements(document, "status", "containerStatuses"):
        states = documents.part(container, "state")
        state = next(iter(states), "")
        reason, message = (documents.text(states, state, key) for key in ("reason", "message"))
        containers.append(SeenContainer(state, reason, message, documents.number(states, state, "exitCode")))
    return SeenPod(document, tuple(containers))


@dataclass(frozen=True)
class SeenEvent:
    """An event of a job or of one of its pods."""

    time: datetime | None
    """When the event was last seen."""
    kind: str
    """`Normal` or `Warning`."""
    reason: str
    message: str
    subject: str
    """Kind and name of the object that the event is about."""
    count: int = 1


def seen_event(document: Mapping[str, Any]) -> SeenEvent:
    """Return an event, which may hold anything."""
    times = (("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",), ("metadata", "creationTimestamp"))
    last = next(filter(None, (documents.text(document, *keys) for keys in times)), "")
    involved = documents.part(document, "involvedObject")
    return SeenEvent(
        documents.moment(last),
        documents.text(document, "type"),
        documents.text(document, "reason"),
        documents.text(document, "message"),
        f"{documents.text(involved, 'kind')}/{documents.text(involved, 'name')}",
        documents.number(document, "series", "count") or documents.number(document, "count") or 1,
    )


def _whole(said: str) -> int:
    return int(said) if said.isascii() and said.isdigit() and len(said) < 10 else 0

"""Jobs, pods and events as they were seen in a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
class SeenJob:
    """A FineTuneJob."""

    document: Mapping[str, Any]
    status: FineTuneJobStatus
    unreadable: tuple[str, ...] = ()
    """Fields of the status that could not be read, and so count as absent."""
    is_on_cpu: bool = False
    """Whether its profile names no GPU, as far as that was looked at."""
    context: str | None = None
    """Context of the kubeconfig that the user named; None: the current one."""

    @property
    def name(self) -> str:
        return documents.text(self.document, "metadata", "name")

    @property
    def namespace(self) -> str:
        return documents.text(self.document, "metadata", "namespace")

    @property
    def title(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags with which any command finds the job."""
        return place_flags(self.namespace, self.context)

    def command(self, verb: str, *more: str) -> str:
        """A command about this job, for a shell, wherever it is typed."""
        subject = f"job/{self.name}" if verb == "explain" else self.name
        return shlex.join(["finetune", verb, subject, *self.flags, *more])

    @property
    def uid(self) -> str:
        return documents.text(self.document, "metadata", "uid")

    @property
    def resource_version(self) -> str:
        """Changes with everything that is written to it."""
        return documents.text(self.document, "metadata", "resourceVersion")

    @property
    def generation(self) -> int:
        """Grows with each change of the spec."""
        return documents.number(self.document, "metadata", "generation") or 0

    @property
    def created(self) -> datetime | None:
        return documents.moment(documents.text(self.document, "metadata", "creationTimestamp"))

    @property
    def labels(self) -> dict[str, str]:
        return documents.texts(self.document, "metadata", "labels")

    @property
    def team(self) -> str:
        """The team that is charged for it."""
        return self.labels.get(LABEL_TEAM) or self.namespace

    @property
    def spec(self) -> Mapping[str, Any]:
        return documents.part(self.document, "spec")

    @property
    def profile(self) -> str:
        """Name of its profile."""
        return documents.text(self.spec, "profile") or DEFAULT_PROFILE

    def with_profile(self, profile: Mapping[str, Any] | None) -> SeenJob:
        """The job with the devices that its profile names; None: the profile was not seen."""
        return replace(self, is_on_cpu=profile is not None and documents.value(profile, "spec", "gpu") is None)

    @property
    def num_ranks(self) -> int:
        """Devices of all training pods together; on the CPU, ranks."""
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
        """When its plan was frozen."""
        return documents.moment(self.status.start_time)

    @property
    def num_nodes(self) -> int:
        """Pods of the gang."""
        return max(documents.number(self.spec, "parallelism", "nodes") or 1, 1)

    @property
    def batch_jobs(self) -> frozenset[str]:
        """Names of the Jobs of its attempts, as far as the status remembers them."""
        return frozenset(batch_job_name(self.name, each.role, each.number, self.num_nodes) for each in self.status.attempts)

    def attempts_of(self, role: Role) -> list[Attempt]:
        """The latest ones, oldest first."""
        return [each for each in self.status.attempts if each.role is role]


def place_flags(namespace: str, context: str | None) -> tuple[str, ...]:
    """Options that name a namespace and, if the user named one, a context."""
    return ("-n", namespace, *(() if context is None else ("--context", context)))


def seen_job(document: Mapping[str, Any]) -> SeenJob:
    """A job whatever its status holds: each field that cannot be read is left out, and named."""
    content = dict(documents.part(document, "status"))
    try:
        return SeenJob(document, read_status(content))
    except (ValidationError, TypeError, AttributeError, ValueError):
        kept = {key: readable for key, value in content.items() if (readable := _readable(key, value)) is not None}
    unreadable = tuple(sorted(key for key in content if kept.get(key) != content[key]))
    return SeenJob(document, read_status(kept), unreadable)


def _readable(key: str, value: object) -> object:
    """The readable part of a field; for a list, its readable elements."""
    if _can_be_read(key, value):
        return value
    if not isinstance(value, list):
        return None
    kept = [one for one in value if _can_be_read(key, [one])]
    return kept if _can_be_read(key, kept) else None


def _can_be_read(key: str, value: object) -> bool:
    try:
        read_status({key: value})
    except (ValidationError, TypeError, AttributeError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class SeenContainer:
    """A container of a pod."""

    name: str
    state: str
    """`running`, `waiting`, `terminated`, or empty."""
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    restarts: int = 0


@dataclass(frozen=True)
class SeenPod:
    """A pod of a job."""

    document: Mapping[str, Any]
    containers: tuple[SeenContainer, ...] = field(default=())

    @property
    def name(self) -> str:
        return documents.text(self.document, "metadata", "name")

    @property
    def uid(self) -> str:
        return documents.text(self.document, "metadata", "uid")

    @property
    def role(self) -> str:
        """A `Role`, or what another release calls one."""
        return documents.text(self.document, "metadata", "labels", LABEL_ROLE)

    @property
    def attempt(self) -> int:
        return _whole(documents.text(self.document, "metadata", "labels", LABEL_ATTEMPT))

    @property
    def node_rank(self) -> int:
        """Its place in the gang; 0 for the other roles."""
        return _whole(documents.text(self.document, "metadata", "labels", INDEX_LABEL))

    @property
    def node(self) -> str:
        """The pod's node; empty: it has no node yet."""
        return documents.text(self.document, "spec", "nodeName")

    @property
    def phase(self) -> str:
        return documents.text(self.document, "status", "phase")

    @property
    def created(self) -> datetime | None:
        return documents.moment(documents.text(self.document, "metadata", "creationTimestamp"))

    @property
    def is_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def has_logs(self) -> bool:
        """Whether a container of it has run."""
        return any(one.state in ("running", "terminated") for one in self.containers)


def seen_pod(document: Mapping[str, Any]) -> SeenPod:
    """A pod whatever its status holds."""
    containers = []
    for each in documents.elements(document, "status", "containerStatuses"):
        states = documents.part(each, "state")
        state = next(iter(states), "")
        containers.append(
            SeenContainer(
                documents.text(each, "name"),
                state,
                documents.text(states, state, "reason"),
                documents.text(states, state, "message"),
                documents.number(states, state, "exitCode"),
                documents.number(each, "restartCount") or 0,
            )
        )
    return SeenPod(document, tuple(containers))


@dataclass(frozen=True)
class SeenEvent:
    """An event of a job or of one of its pods."""

    time: datetime | None
    """When it was seen last."""
    kind: str
    """`Normal` or `Warning`."""
    reason: str
    message: str
    subject: str
    """Kind and name of the object."""
    count: int = 1


def seen_event(document: Mapping[str, Any]) -> SeenEvent:
    """An event whatever it holds."""
    last = next(
        (
            documents.text(document, *keys)
            for keys in (("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",), ("metadata", "creationTimestamp"))
            if documents.text(document, *keys)
        ),
        "",
    )
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

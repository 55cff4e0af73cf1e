"""Views of a job's children: Jobs, pods, ConfigMaps, and writes that the API server refused.

They are frozen plain data, made by `cluster.projection` from the server's objects. Times are aware and in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from finetune_job.names import Role


@dataclass(frozen=True, slots=True)
class JobConditionView:
    """A condition with status True of a batch Job."""

    type: str
    """`FailureTarget`, `Failed`, `SuccessCriteriaMet`, `Complete`, `Suspended`."""
    reason: str = ""
    message: str = ""
    since: datetime | None = None
    """`lastTransitionTime`."""


@dataclass(frozen=True, slots=True)
class BatchJobView:
    """A batch Job of one role and attempt."""

    name: str
    uid: str
    role: Role
    attempt: int
    created: datetime
    conditions: tuple[JobConditionView, ...] = ()
    """Only the conditions that are True."""
    suspended: bool = False
    """`spec.suspend`: set by a queue such as Kueue, and by us only together with a gate."""
    parallelism: int | None = None
    """Number of pods that run at the same time; for a gang, all of them."""
    restarts_container: bool = False
    """Whether the kubelet restarts its container in the same pod after a failure of the processes alone. False if the API
    server does not know such rules."""
    admission_gates: tuple[str, ...] = ()
    """Gates that keep Kueue from admitting the Job, whatever capacity there is."""
    start_time: datetime | None = None
    """`status.startTime`; the Job controller resets it when a suspended Job resumes."""
    deleting: bool = False
    events: tuple[str, ...] = ()
    """Texts of Warning events of the Job itself (`FailedCreate`: a quota on pods, Pod Security), latest last."""
    queue: str = ""
    """The queue's explanation of why it holds the Job back (Kueue: reason and message of its Workload); empty if unknown."""

    def has(self, *types: str) -> bool:
        """Whether one of these conditions is True."""
        return any(condition.type in types for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """How a container ended that the kubelet has restarted since, or is about to restart."""

    started: datetime | None = None
    finished: datetime | None = None
    exit_code: int | None = None
    reason: str = ""
    termination_message: str = ""


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of one role and attempt. After its deletion its last known state is kept (`gone`) until its Job is gone too."""

    name: str
    uid: str
    role: Role
    attempt: int
    """Number in the name of its Job. A restarted container may run the next attempt, see `in_attempt`."""
    created: datetime
    node_rank: int = 0
    """`batch.kubernetes.io/job-completion-index`."""
    phase: str = "Pending"
    gone: bool = False
    """Whether a DELETED event was seen; the view then is the last state before it."""
    deletion_requested: datetime | None = None
    """`deletionTimestamp` minus the grace period: when somebody asked for the deletion."""
    deletion_due: datetime | None = None
    """`deletionTimestamp`: when its grace period is over. A pod that is still there later is on a node that does not answer."""
    scheduled: datetime | None = None
    """When the scheduler found a node for it."""
    prepared: datetime | None = None
    """When it had its volumes and its network, according to the kubelet's condition `PodReadyToStartContainers`."""
    disruption: str = ""
    """Reason of the condition `DisruptionTarget`, empty without one."""
    started: datetime | None = None
    """When the container began to run."""
    finished: datetime | None = None
    exit_code: int | None = None
    """Exit code of the container, once it has ended."""
    reason: str = ""
    """Reason of the ended container (`OOMKilled`, `Error`, `Completed`), or of the pod (`Evicted`) where no container ended."""
    eviction: str = ""
    """The kubelet's message if it has evicted the pod, whatever its containers ended with."""
    termination_message: str = ""
    restarts: int = 0
    """How often the kubelet has restarted the container."""
    earlier: ContainerEnd | None = None
    """How the container ended before its latest restart."""
    label_attempt: int | None = None
    """The attempt that its label names. A restarted container learns from it which attempt it may run."""
    waiting_reason: str = ""
    """Reason of a container that does not run yet: `ImagePullBackOff`, `ContainerCreating`, ..."""
    waiting_message: str = ""
    """Message of a container that does not run yet: for an image that cannot be pulled, its name and the registry's answer."""
    unschedulable: str = ""
    """Message of the condition `PodScheduled` while it is False."""
    events: tuple[str, ...] = ()
    """Texts of Warning events of a pod that has been pending for more than a few seconds, latest last."""
    pod_ip: str = ""
    node: str = ""

    @property
    def is_terminal(self) -> bool:
        """Whether none of its containers can run any more."""
        return self.gone or self.phase in ("Succeeded", "Failed")

    def in_attempt(self, number: int) -> PodView:
        """Return the pod as this attempt sees it: it ended with its container, whatever has happened to the pod since."""
        if self.restarts <= number - self.attempt:
            return self
        end = self.earlier or ContainerEnd()
        return replace(
            self,
            phase="Failed",
            gone=False,
            deletion_requested=None,
            deletion_due=None,
            disruption="",
            eviction="",
            started=end.started,
            finished=end.finished,
            exit_code=end.exit_code,
            reason=end.reason,
            termination_message=end.termination_message,
            waiting_reason="",
            waiting_message="",
        )


@dataclass(frozen=True)
class ConfigMapView:
    """The ConfigMap with the frozen plan."""

    name: str
    uid: str
    plan_json: str
    """Text under the key of the plan, empty where the key is missing."""


@dataclass(frozen=True)
class PolicyView:
    """A NetworkPolicy of the job."""

    name: str
    uid: str


@dataclass(frozen=True)
class LiveJob:
    """A batch Job that a live list has shown."""

    name: str
    uid: str
    deleting: bool = False


@dataclass(frozen=True)
class LivePod:
    """A pod that a live list has shown and that can still run."""

    name: str
    uid: str
    node: str = ""
    deletion_due: datetime | None = None
    """`deletionTimestamp`: when its grace period is over; None if its deletion was not requested."""
    orphaned: bool = False
    """Whether nothing controls it, so that nothing else will ever delete it."""


@dataclass(frozen=True)
class LiveChildren:
    """Answer of live lists without label selector, filtered by owner UID: what really exists, whatever a cache says."""

    batch_jobs: tuple[LiveJob, ...] = ()
    """Every batch Job of this FineTuneJob, deleting ones included."""
    running_pods: tuple[LivePod, ...] = ()
    """The pods of this FineTuneJob, of any attempt, whose phase is neither Succeeded nor Failed."""


@dataclass(frozen=True)
class RefusedWrite:
    """A child that the API server refused to create or to change: for a quota, an admission plugin, a webhook, or a missing
    right.
    """

    kind: str
    name: str
    code: int
    """HTTP status: 403, 422, ..."""
    message: str
    """The server's message."""
    since: datetime
    """When it was first refused."""
    tries: int
    """How often it has been refused since then."""
    retry_at: datetime
    """No such write of this job is tried before then."""

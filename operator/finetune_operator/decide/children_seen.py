"""What the operator knows of a job's children: Jobs, pods, ConfigMaps, and writes of them that the API server refused.

Frozen plain data, made by `cluster.projection` from the server's objects, or by a test. Times are aware and in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from finetune_job.names import Role


@dataclass(frozen=True, slots=True)
class JobConditionView:
    """A condition of a batch Job whose status is True."""

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
    """Only those that are True."""
    suspended: bool = False
    """`spec.suspend`: set by a queue such as Kueue, and by us only together with a gate."""
    parallelism: int | None = None
    """Pods that run at a time: for a gang all of them."""
    restarts_container: bool = False
    """Whether the kubelet is to start its container again in the same pod after a failure of the processes alone, as far as the
    API server knows such rules."""
    admission_gates: tuple[str, ...] = ()
    """What keeps Kueue from admitting it, whatever room there is."""
    start_time: datetime | None = None
    """`status.startTime`; the Job controller resets it when a suspended Job resumes."""
    deleting: bool = False
    events: tuple[str, ...] = ()
    """Texts of Warning events of the Job itself (`FailedCreate`: a quota on pods, Pod Security), latest last."""
    queue: str = ""
    """Why a queue holds the Job back, in its words (Kueue: the reason and message of its Workload); empty: not known."""

    def has(self, *types: str) -> bool:
        """Whether one of these conditions is True."""
        return any(condition.type in types for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """How a container ended that the kubelet has started again since, or is about to."""

    started: datetime | None = None
    finished: datetime | None = None
    exit_code: int | None = None
    reason: str = ""
    termination_message: str = ""


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of one role and attempt; kept with its last known state (`gone`) after its deletion, until its Job is gone too."""

    name: str
    uid: str
    role: Role
    attempt: int
    """Of its Job. A container that was started again may run the next one, see `in_attempt`."""
    created: datetime
    node_rank: int = 0
    """`batch.kubernetes.io/job-completion-index`."""
    phase: str = "Pending"
    gone: bool = False
    """A DELETED event was seen: this is the last state before it."""
    deletion_requested: datetime | None = None
    """`deletionTimestamp` less the grace period: when somebody asked for the deletion."""
    deletion_due: datetime | None = None
    """`deletionTimestamp`: when its grace period is over. A pod that is still there later is on a node that does not answer."""
    scheduled: datetime | None = None
    """When the scheduler found a node for it."""
    prepared: datetime | None = None
    """When it had its volumes and its network, by the kubelet's condition `PodReadyToStartContainers`."""
    disruption: str = ""
    """Reason of the condition `DisruptionTarget`, empty without one."""
    started: datetime | None = None
    """When the container began to run."""
    finished: datetime | None = None
    exit_code: int | None = None
    """Of the container, once it has ended."""
    reason: str = ""
    """Of the ended container (`OOMKilled`, `Error`, `Completed`), or of the pod (`Evicted`) where no container ended."""
    eviction: str = ""
    """The kubelet's message if it has evicted the pod, whatever its containers ended with."""
    termination_message: str = ""
    restarts: int = 0
    """How often the kubelet has started the container again."""
    earlier: ContainerEnd | None = None
    """How it ended before."""
    label_attempt: int | None = None
    """The attempt that its label names: from there a container that was started again learns which one it may run."""
    waiting_reason: str = ""
    """Of a container that does not run yet: `ImagePullBackOff`, `ContainerCreating`, ..."""
    waiting_message: str = ""
    """What the kubelet says of it: with an image that cannot be pulled, its name and the registry's words."""
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
        """The pod as this attempt sees it: ended with its container, whatever has happened to it since."""
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
    """`deletionTimestamp`: when its grace period is over; None: nobody has asked for its deletion."""
    orphaned: bool = False
    """Nothing controls it, so nobody else will ever delete it."""


@dataclass(frozen=True)
class LiveChildren:
    """Answer of live lists without label selector, filtered by owner UID: what really exists, whatever a cache says."""

    batch_jobs: tuple[LiveJob, ...] = ()
    """Every batch Job of this FineTuneJob, deleting ones included."""
    running_pods: tuple[LivePod, ...] = ()
    """The pods of this FineTuneJob, of any attempt, whose phase is neither Succeeded nor Failed."""


@dataclass(frozen=True)
class RefusedWrite:
    """A child that the API server refused to create or to change: for a quota, an admission plugin or webhook, a right."""

    kind: str
    name: str
    code: int
    """HTTP status: 403, 422, ..."""
    message: str
    """The server's words."""
    since: datetime
    """When it was refused first."""
    tries: int
    """How often it was refused since."""
    retry_at: datetime
    """No such write of this job is to be tried before then."""

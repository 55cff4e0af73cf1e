"""Views of a job's children (Jobs, pods, ConfigMaps), and of writes that the API server refused.

They are immutable plain data, which `cache.projection` derives from the server's objects. Times are timezone-aware and in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from finetune_job.names import Role


@dataclass(frozen=True, slots=True)
class JobConditionView:
    """A condition of a batch Job, one whose status is True."""

    type: str
    """Type of the condition: `FailureTarget`, `Failed`, `SuccessCriteriaMet`, `Complete` or `Suspended`."""
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
    """Number of pods that run at the same time; for a gang, all its pods."""
    admission_gates: tuple[str, ...] = ()
    """Gates that keep Kueue from admitting the Job, even if there is capacity."""
    start_time: datetime | None = None
    """`status.startTime`, which the Job controller resets when a suspended Job resumes."""
    deleting: bool = False
    events: tuple[str, ...] = ()
    """Texts of Warning events of the Job itself (`FailedCreate`: a quota on pods, Pod Security); the latest comes last."""
    queue: str = ""
    """The queue's explanation of why it holds back the Job (for Kueue, its Workload's reason and message); empty if unknown."""

    def has(self, *types: str) -> bool:
        """Whether any of these conditions is True."""
        return any(condition.type in types for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of one role and attempt. After a pod is deleted, its last known state is kept (`gone`) while a pass may need it."""

    name: str
    uid: str
    role: Role
    attempt: int
    """Attempt number, from the name of the pod's Job."""
    created: datetime
    node_rank: int = 0
    """`batch.kubernetes.io/job-completion-index`."""
    phase: str = "Pending"
    gone: bool = False
    """Whether the pod was deleted. If so, the view shows its last known state."""
    deletion_requested: datetime | None = None
    """`deletionTimestamp` minus the grace period: when the deletion was requested."""
    deletion_due: datetime | None = None
    """`deletionTimestamp`: when the grace period ends. If the pod still exists after that, its node does not answer."""
    scheduled: datetime | None = None
    """When the scheduler assigned the pod to a node."""
    prepared: datetime | None = None
    """When volumes and network were ready, according to the kubelet's condition `PodReadyToStartContainers`."""
    disruption: str = ""
    """Reason of the condition `DisruptionTarget`; empty if there is no such condition."""
    started: datetime | None = None
    """When the container began to run."""
    finished: datetime | None = None
    exit_code: int | None = None
    """Exit code of the container; None until it has ended."""
    reason: str = ""
    """Reason of the terminated container (`OOMKilled`, `Error`, `Completed`) or, if none terminated, of the pod (`Evicted`)."""
    eviction: str = ""
    """The kubelet's message if it has evicted the pod, no matter how the containers ended."""
    termination_message: str = ""
    waiting_reason: str = ""
    """Reason of a container that is not running yet: `ImagePullBackOff`, `ContainerCreating`, ..."""
    waiting_message: str = ""
    """Message of a container that is not running yet: for an image that cannot be pulled, its name and the registry's answer."""
    unschedulable: str = ""
    """Message of the condition `PodScheduled` while it is False."""
    events: tuple[str, ...] = ()
    """Texts of Warning events about a pod that has been pending for more than a few seconds; the latest comes last."""
    pod_ip: str = ""
    node: str = ""

    @property
    def is_terminal(self) -> bool:
        """Whether none of the pod's containers can run any more."""
        return self.gone or self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class ConfigMapView:
    """The ConfigMap with the frozen plan."""

    name: str
    uid: str
    plan_json: str
    """Text under the key of the plan; empty if the key is missing."""


@dataclass(frozen=True)
class PolicyView:
    """A NetworkPolicy of the job."""

    name: str
    uid: str


@dataclass(frozen=True)
class LiveJob:
    """A batch Job found by a live list."""

    name: str
    uid: str
    deleting: bool = False


@dataclass(frozen=True)
class LivePod:
    """A pod found by a live list that can still run."""

    name: str
    uid: str
    node: str = ""
    deletion_due: datetime | None = None
    """`deletionTimestamp`: when the grace period ends; None if no deletion was requested."""
    orphaned: bool = False
    """Whether the pod has no controller, so that nothing else will ever delete it."""


@dataclass(frozen=True)
class LiveChildren:
    """Children that really exist, whatever the cache shows, from live lists without a label selector, filtered by owner UID."""

    batch_jobs: tuple[LiveJob, ...] = ()
    """All batch Jobs of this FineTuneJob, including those that are being deleted."""
    running_pods: tuple[LivePod, ...] = ()
    """All pods of this FineTuneJob, from any attempt, whose phase is neither Succeeded nor Failed."""


@dataclass(frozen=True)
class RefusedWrite:
    """The API server's refusal to create or change a child (a quota, an admission plugin, a webhook, a missing permission)."""

    kind: str
    name: str
    code: int
    """HTTP status: 403, 422, ..."""
    message: str
    """The server's message."""
    tries: int
    """Number of times in a row that this write was refused."""
    retry_at: datetime
    """Time before which no child of this job is created or changed."""

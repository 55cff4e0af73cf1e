"""Everything that a reconcile pass may look at, as immutable plain data gathered by `passes.gather`.

Only objects whose controller reference has the UID of the job count as children. Objects that have a child's name but belong to
somebody else are in `Observed.conflicts`. Times are timezone-aware and in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.api.status import FineTuneJobStatus
from finetune_job.names import Role
from finetune_job.progress import Progress
from finetune_operator.decide.seen.children_seen import (
    BatchJobView,
    ConfigMapView,
    LiveChildren,
    PodView,
    PolicyView,
    RefusedWrite,
)


@dataclass(frozen=True)
class JobView:
    """The FineTuneJob."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    """Precondition of the status write."""
    spec: FineTuneJobSpec | None
    """None if the manifest does not parse."""
    spec_error: str = ""
    """The parser's message, one line per wrong field."""
    status: FineTuneJobStatus = field(default_factory=FineTuneJobStatus)
    deleting: bool = False
    """Whether the job was deleted but is still kept by a finalizer."""
    orphaning: bool = False
    """Whether the job was deleted with the propagation policy Orphan, so that its children stay."""


@dataclass(frozen=True)
class ProfileView:
    """The profile that the job uses: the one named in `spec.profile`, or else the default profile."""

    name: str
    spec: FineTuneProfileSpec | None = None
    """None if the profile does not exist or does not parse."""
    error: str = ""
    """The parser's message; empty if the profile does not exist."""


@dataclass(frozen=True)
class NamespaceView:
    """The job's namespace."""

    labels: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    """Why the labels of the namespace cannot be read."""


@dataclass(frozen=True)
class NodeConditionView:
    """A condition of a node."""

    type: str
    status: str
    reason: str
    message: str
    since: datetime | None
    """`lastTransitionTime`."""


@dataclass(frozen=True)
class NodeView:
    """A node."""

    name: str
    conditions: tuple[NodeConditionView, ...]


@dataclass(frozen=True)
class PlaceInLine:
    """The place in line of a job that has not started. Each namespace has a line for each profile with `maxActiveJobs`."""

    limit: int
    ahead: int
    """Number of active jobs and of older waiting jobs; the job may start once this is below the limit."""


@dataclass(frozen=True)
class Observed:
    """Input of `reconcile`."""

    job: JobView
    profile: ProfileView
    namespace: NamespaceView | None = None
    """The namespace; read only if the profile has a `namespaceSelector` and nothing has been created from the plan."""
    operator_namespace: str = ""
    """Namespace of the operator, which asks rank 0 for its progress."""
    batch_jobs: tuple[BatchJobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    plan: ConfigMapView | None = None
    service_uid: str = ""
    """UID of the gang's Service; empty if the job has none."""
    network_policies: tuple[PolicyView, ...] = ()
    """The NetworkPolicies of the job, looked up only if `decide.stages.finish.has_expired` returns True."""
    claims: frozenset[str] = frozenset()
    """Names of those claims in `children.claims.claims_named_by(spec, job name)` that exist. Until something is created from the
    plan, a claim with the template's name counts only if the job may use it and it will stay."""
    vanishing: tuple[str, ...] = ()
    """`Kind/name` of objects that have a child's name, but belong to an earlier job of the same name and will go away: they are
    being deleted, or the garbage collector will delete them."""
    conflicts: tuple[str, ...] = ()
    """`Kind/name` of other foreign objects that have a child's name, found when creating the child failed. They are looked up
    again in every pass, because nothing is created while one of them exists."""
    live: LiveChildren | None = None
    """Result of a live list, which is made whenever `decide.stages.blocked.needs_live_list` returns True. Without one (None), no
    Job of a later attempt is created."""
    refused: RefusedWrite | None = None
    """The write of a child that the API server refused in an earlier pass; None once a write has succeeded."""
    line: PlaceInLine | None = None
    """The job's place in line; None if the profile sets no limit."""
    nodes: tuple[NodeView, ...] = ()
    """The nodes that `decide.failures.device_faults.nodes_in_question` returns."""
    waiting_in_queue: int | None = None
    """Number of Workloads waiting in the ClusterQueue of training, looked up only if `decide.stages.train_stage.queue_of_growth`
    returns a queue; None if not looked up or not known."""
    progress: Progress | None = None
    """Latest progress of rank 0, set only when it is due to be written; None leaves the progress in status unchanged."""

    @property
    def service_exists(self) -> bool:
        """Whether the gang's Service exists."""
        return bool(self.service_uid)

    def batch_job(self, role: Role, attempt: int) -> BatchJobView | None:
        """The Job that runs an attempt of a role, even if the Job is being deleted."""
        return next((job for job in self.batch_jobs if (job.role, job.attempt) == (role, attempt)), None)

    def pods_of(self, role: Role, attempt: int) -> tuple[PodView, ...]:
        """The pods of a role and attempt, including those that are gone, sorted by node rank."""
        pods = (pod for pod in self.pods if pod.role is role and pod.attempt == attempt)
        return tuple(sorted(pods, key=lambda pod: (pod.node_rank, pod.created, pod.name)))

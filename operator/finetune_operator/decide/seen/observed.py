"""Everything that one reconcile pass may look at, as frozen plain data gathered by `passes.gather`.

Only objects whose controller owner reference has the UID of the job count as children. Objects with a child's name that belong
to somebody else are in `Observed.conflicts`. Times are timezone-aware and in UTC.
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
    """Whether it was deleted and a finalizer still keeps it."""
    orphaning: bool = False
    """Whether it was deleted with the policy Orphan, so what it owns stays."""


@dataclass(frozen=True)
class ProfileView:
    """The profile that the job uses: `spec.profile`, or the default profile if that is unset."""

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
    """The place in line of a job that has not started. There is a line per namespace and profile with `maxActiveJobs`."""

    limit: int
    ahead: int
    """Number of jobs that are active, or wait and are older; the job may start while this is below the limit."""


@dataclass(frozen=True)
class Observed:
    """Input of `reconcile`."""

    job: JobView
    profile: ProfileView
    namespace: NamespaceView | None = None
    """The namespace; read only if the profile has a `namespaceSelector` and nothing has begun."""
    operator_namespace: str = ""
    """Namespace of the operator, which asks rank 0 for its progress."""
    batch_jobs: tuple[BatchJobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    plan: ConfigMapView | None = None
    service_uid: str = ""
    """UID of the gang's Service; empty if the job has none."""
    network_policies: tuple[PolicyView, ...] = ()
    """The NetworkPolicies of the job, looked up only if `decide.stages.finish.has_expired` asks for them."""
    claims: frozenset[str] = frozenset()
    """Names of the existing claims among `children.claims.claims_named_by(spec, job name)`. Before anything has begun, a
    claim with the template's name counts only if the job may use it and it will stay."""
    vanishing: tuple[str, ...] = ()
    """`Kind/name` of objects of an earlier job of this name that have the name of a child and will go away: they are being
    deleted, or the garbage collector will delete them."""
    conflicts: tuple[str, ...] = ()
    """`Kind/name` of other objects that have the name of a child and are not ours, found when creating the child failed. They
    are looked up again in every pass, because nothing is created while one of them exists."""
    live: LiveChildren | None = None
    """Result of a live list, which is requested whenever `decide.stages.blocked.needs_live_list` asks for it. Without one (None),
    no Job of a later attempt is created."""
    refused: RefusedWrite | None = None
    """The write of a child that the API server refused in an earlier pass, until one has succeeded."""
    line: PlaceInLine | None = None
    """None if the profile sets no limit."""
    nodes: tuple[NodeView, ...] = ()
    """The nodes that `decide.failures.device_faults.nodes_in_question` names."""
    waiting_in_queue: int | None = None
    """Number of Workloads that wait in training's ClusterQueue, looked up only if `decide.stages.train_stage.queue_of_growth`
    names its queue; None if not looked up or not known."""
    progress: Progress | None = None
    """Latest progress of rank 0, set only when it is due to be written; if it is None, status keeps its progress."""

    @property
    def service_exists(self) -> bool:
        """Whether the gang's Service exists."""
        return bool(self.service_uid)

    def batch_job(self, role: Role, attempt: int) -> BatchJobView | None:
        """The Job that runs an attempt of a role, even if it is being deleted."""
        return next((job for job in self.batch_jobs if (job.role, job.attempt) == (role, attempt)), None)

    def pods_of(self, role: Role, attempt: int) -> tuple[PodView, ...]:
        """The pods of a role and attempt, including those that are gone, sorted by node rank."""
        pods = (pod for pod in self.pods if pod.role is role and pod.attempt == attempt)
        return tuple(sorted(pods, key=lambda pod: (pod.node_rank, pod.created, pod.name)))

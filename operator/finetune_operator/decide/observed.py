"""Everything that one reconcile pass may look at, as frozen plain data gathered by `cluster.gather`.

Children are listed only when their controller owner reference has the UID of the job. Objects that carry a child's name but
belong to somebody else are in `Observed.conflicts`. Times are aware and in UTC.
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
from finetune_operator.decide.children_seen import (
    BatchJobView,
    ConfigMapView,
    LiveChildren,
    PodView,
    PolicyView,
    RefusedWrite,
)
from finetune_operator.decide.job_numbers import job_number


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
    """None where the manifest does not parse."""
    spec_error: str = ""
    """The parser's message, one line per wrong field."""
    status: FineTuneJobStatus = field(default_factory=FineTuneJobStatus)
    deleting: bool = False
    """Whether somebody has deleted it and a finalizer holds it."""
    orphaning: bool = False
    """Whether it was deleted with the policy Orphan, so that what it owns stays."""


@dataclass(frozen=True)
class ProfileView:
    """The profile that the job names (`spec.profile`, else the default one)."""

    name: str
    spec: FineTuneProfileSpec | None = None
    """None where it does not exist or does not parse."""
    error: str = ""
    """The parser's message; empty where the profile does not exist."""


@dataclass(frozen=True)
class NamespaceView:
    """The job's namespace."""

    labels: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    """Why its labels cannot be read."""


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
    """The place of a job that is not started among those of its namespace, under the profile's `maxActiveJobs`."""

    limit: int
    ahead: int
    """Jobs that are active, or were created earlier and wait as well; the job may start while this is below the limit."""


@dataclass(frozen=True)
class Observed:
    """Input of `reconcile`."""

    job: JobView
    profile: ProfileView
    namespace: NamespaceView | None = None
    """It is read if the profile has a `namespaceSelector` and nothing has begun."""
    operator_namespace: str = ""
    """Namespace of the operator, which asks rank 0 for its progress."""
    batch_jobs: tuple[BatchJobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    plan: ConfigMapView | None = None
    service_uid: str = ""
    """UID of the gang's Service; empty if there is none of ours."""
    network_policies: tuple[PolicyView, ...] = ()
    """They are looked up if `decide.finish.has_expired` says so."""
    claims: frozenset[str] = frozenset()
    """Names of the existing claims among `children.claims.claims_named_by(spec, job name)`. Before anything has begun, the
    claim that is made from the template counts only if it stays."""
    vanishing: tuple[str, ...] = ()
    """`Kind/name` of objects of an earlier job of this name that have the name of a child and will go away: they are being
    deleted, or the garbage collector will delete them."""
    conflicts: tuple[str, ...] = ()
    """`Kind/name` of other objects that have the name of a child and are not ours, as creates found them. They are looked up
    again in every pass, because nothing is created while there is one."""
    live: LiveChildren | None = None
    """Result of a live list, made whenever `decide.blocked.needs_live_list` says so; None if there was none, and then no Job of
    a later attempt is created."""
    refused: RefusedWrite | None = None
    """The write of a child that the API server refused in an earlier pass, until one has succeeded."""
    line: PlaceInLine | None = None
    """None if the profile sets no limit."""
    too_complex: bool = False
    """Whether judging this generation of the job took more CPU time than a pass may take; before its start such a job is
    refused unread."""
    nodes: tuple[NodeView, ...] = ()
    """The nodes that `decide.device_faults.nodes_in_question` names."""
    waiting_in_queue: int | None = None
    """Number of Workloads that wait in the ClusterQueue of training, looked up if `decide.train_stage.queue_of_growth` names
    its queue; None if not looked up or not known."""
    progress: Progress | None = None
    """Latest progress of rank 0, given only when it is due to be written; None leaves the status as it is."""

    @property
    def service_exists(self) -> bool:
        """Whether the gang's Service is there."""
        return bool(self.service_uid)

    def batch_job(self, role: Role, attempt: int) -> BatchJobView | None:
        """The Job that runs an attempt of a role, deleting ones included: its own, or that of the attempt before it."""
        jobs = {job.attempt: job for job in self.batch_jobs if job.role is role}
        return jobs.get(attempt) or jobs.get(job_number(self.job.status, role, attempt))

    def pods_of(self, role: Role, attempt: int) -> tuple[PodView, ...]:
        """The pods of a role and attempt as that attempt sees them, gone ones included, by node rank."""
        job = self.batch_job(role, attempt)
        number = job_number(self.job.status, role, attempt) if job is None else job.attempt
        return tuple(pod.in_attempt(attempt) for pod in self._pods_by_rank(role, number))

    def pods_of_job(self, batch_job: BatchJobView) -> tuple[PodView, ...]:
        """The pods of a Job as they are, gone ones included, by node rank."""
        return self._pods_by_rank(batch_job.role, batch_job.attempt)

    def _pods_by_rank(self, role: Role, number: int) -> tuple[PodView, ...]:
        pods = (pod for pod in self.pods if pod.role is role and pod.attempt == number)
        return tuple(sorted(pods, key=lambda pod: (pod.node_rank, pod.created, pod.name)))

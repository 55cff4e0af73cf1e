"""The actions that a reconcile pass decides on. The executor keeps to this order, because later steps depend on earlier ones:

1. `status`, one write with the observed resourceVersion as precondition. If it is refused (409) or fails, nothing else is
   done, and the job is reconciled again from its new state. So the plan is frozen before the first child exists, and the next
   attempt's number is written, together with the evidence of the last one, before anything is deleted.
2. `deletes`, with propagation policy Foreground and the UID as precondition; "not found" and "another UID" count as done.
3. `ungates`, with the UID as precondition.
4. `creates`; "already exists" counts as done if the controller owner is this job, otherwise the object is a conflict.
5. `events`.

The executor may die between any two steps: the next pass starts afresh from what it observes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.finding import Finding
from finetune_job.reasons import Reason

DeletedKind = Literal["Job", "Service", "ConfigMap", "NetworkPolicy", "Pod"]


@dataclass(frozen=True)
class Create:
    """Create an object. `body` has at least apiVersion, kind, namespace and name."""

    body: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Kind of the object."""
        return str(self.body["kind"])

    @property
    def name(self) -> str:
        """Name of the object."""
        return str(self.body["metadata"]["name"])


@dataclass(frozen=True)
class Delete:
    """Delete a child in the job's namespace, in the foreground."""

    kind: DeletedKind
    name: str
    uid: str
    """Precondition of the deletion, so that a newer object with the same name is not deleted."""
    force: bool = False
    """Whether to delete without a grace period. Used only for a pod whose node is lost, and only if the profile allows it."""


@dataclass(frozen=True)
class Ungate:
    """Remove our gate from a Job that waits in a queue."""

    name: str
    uid: str
    """Precondition of the write."""
    remaining: tuple[str, ...]
    """Gates of other controllers, which stay."""


@dataclass(frozen=True)
class Emit:
    """A Kubernetes event on the FineTuneJob."""

    type: Literal["Normal", "Warning"]
    reason: Reason
    message: str


@dataclass(frozen=True)
class Actions:
    """Output of `reconcile`."""

    status: FineTuneJobStatus | None = None
    """The new status; None if it does not change."""
    deletes: tuple[Delete, ...] = ()
    ungates: tuple[Ungate, ...] = ()
    creates: tuple[Create, ...] = ()
    events: tuple[Emit, ...] = ()
    news: tuple[Finding, ...] = ()
    """Findings that are new for this generation of the job; metrics count them once the status is written."""
    requeue_after_seconds: float | None = None
    """Seconds until the next deadline, when the job is reconciled again even if nothing has changed."""

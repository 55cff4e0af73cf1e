"""`spec.run`: how the run is driven, the only part that may change after the start; and `spec.preflight`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from finetune_job.api.base import ApiModel


class RunSpec(ApiModel):
    """Suspension, cancellation, restarts and deadlines."""

    suspend: bool = False
    """Release all pods and keep the checkpoint. Setting it back continues from there."""
    queue_name: Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] | None = None
    """Queue (Kueue LocalQueue of this namespace) that admits the training Job. Unset: the profile's, if it names one."""
    priority_class_name: Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] | None = (
        None
    )
    """Priority of the training: under a queue the WorkloadPriorityClass of its Job, without one the PriorityClass of its pods.
    Unset: the profile's, if it names one."""
    cancel: bool = False
    """End the job for good. Cannot be taken back."""
    retry: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Raise it to try again after `Stalled`."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 3
    """Restarts of the gang after failures that are not the infrastructure's."""
    startup_deadline_seconds: Annotated[int, Field(ge=10, le=604_800)] = 1800
    """How long the pods of one role may take until all of them run, once there is room for them: waiting in a queue or for capacity
    does not count."""
    stall_deadline_seconds: Annotated[int, Field(ge=60, le=604_800)] | None = None
    """How long the training may show no new step although all of its pods run; then the gang is restarted, and that counts. Unset:
    only the ranks' own watchdog (training.stepTimeoutSeconds) ends a run that hangs."""
    active_deadline_seconds: Annotated[int, Field(ge=10, le=31_536_000)] | None = None
    """How long the whole job may take from its start. Unset: no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """When the job's pods and Jobs are deleted after the end; the FineTuneJob itself stays. Unset: never."""


class Rehearsal(StrEnum):
    """Whether preflight tries the job on a small twin of the model."""

    RUN = "Run"
    SKIP = "Skip"


class PreflightSpec(ApiModel):
    """What is tried before any GPU is taken."""

    rehearsal: Rehearsal = Rehearsal.RUN
    """Run: a twin of the model with few layers and small widths is trained, saved, resumed and merged with the job's settings on
    two CPU ranks. Skip: only rules and structure are checked."""

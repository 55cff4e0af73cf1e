"""`status`: what the operator reports. Only the operator writes it, in one write per pass."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_job.api.base import ApiModel
from finetune_job.failures import FailureClass
from finetune_job.finding import MAX_TEXT_LENGTH, Finding
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType

Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_LENGTH)]
Timestamp = Annotated[str, StringConstraints(max_length=32)]
"""A time in RFC 3339, in UTC, to whole seconds."""
Number = Annotated[str, StringConstraints(max_length=32)]
"""A number with a fraction, as text."""


class StatusModel(ApiModel):
    """The base of all parts of the status. Unknown fields are ignored: a newer operator may have written them."""

    model_config = ApiModel.model_config | {"extra": "ignore"}


class Condition(StatusModel):
    """A condition as in Kubernetes' API conventions."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, StringConstraints(max_length=128)]
    message: Text = ""
    observed_generation: int = 0
    last_transition_time: Timestamp


class FineTuneProfileStatus(StatusModel):
    """The operator's verdict on a profile."""

    observed_generation: int = 0
    """Generation of the profile that was judged."""
    conditions: list[Condition] = Field(default_factory=list, max_length=8)
    """Ready: whether jobs can name it, and if not, why."""


class PlanChoice(StatusModel):
    """A value that the manifest left unset and the plan fixed."""

    field: Text
    value: Text
    """The value as JSON."""
    reason: Text = ""


class PlanStatus(StatusModel):
    """The frozen plan. The effective settings are `choices` together with the spec, which includes the API server's
    defaults.
    """

    hash: Annotated[str, StringConstraints(max_length=64)]
    """SHA-256 of the plan's canonical JSON."""
    trainer_image: Text = ""
    model_digest: Text = ""
    """Digest of the base model's files, computed by preflight."""
    data_hash: Text = ""
    """Digest of the prepared data, computed by preflight."""
    choices: list[PlanChoice] = Field(default_factory=list, max_length=64)
    """Values chosen for settings that the manifest left unset."""


class MemoryStatus(StatusModel):
    """The memory of a training rank, as preflight estimated it from the real model."""

    estimate: int
    """Bytes that the fullest rank needs: on its device, or without one in the pod's memory."""
    limit: int | None = None
    """Bytes that a rank may take, according to the profile."""


class RankFailure(StatusModel):
    """Outcome of one pod that ended without success; kept as evidence before anything is deleted."""

    pod: Annotated[str, StringConstraints(max_length=253)]
    node_rank: int | None = None
    exit_code: int | None = None
    failure: FailureClass
    rank: int | None = None
    step: int | None = None
    message: Text = ""
    hint: Text = ""
    time: Timestamp = ""
    node: Annotated[str, StringConstraints(max_length=253)] = ""
    """The node that the pod ran on."""


class RestartInPod(StatusModel):
    """A restart of failed ranks inside their pod, in a gang of one pod."""

    failure: FailureClass
    message: Text = ""
    rank: int | None = None
    step: int | None = None
    time: Timestamp = ""
    """When the failure was seen."""


class GpuSeconds(StatusModel):
    """Seconds for which training pods held GPUs, times the number of GPUs."""

    waiting: int = 0
    """GPU seconds before the pod's container started."""
    productive: int = 0
    """GPU seconds of training that a checkpoint, or the end of the training, preserved."""
    lost: int = 0
    """GPU seconds of training whose result was lost."""


class Attempt(StatusModel):
    """One attempt at the work of a role; for training, one run of the gang."""

    role: Role = Role.TRAIN
    number: int
    start_time: Timestamp = ""
    scheduled_time: Timestamp = ""
    """When the last of the attempt's pods had a node."""
    prepared_time: Timestamp = ""
    """When the last of the attempt's pods had its volumes and its network; only the pull of its image then remains."""
    running_time: Timestamp = ""
    """When the last of the attempt's pods began to run."""
    end_time: Timestamp = ""
    nodes: int | None = None
    """Number of pods of an elastic gang; unset for other gangs, which always have `parallelism.nodes`."""
    ranks: int | None = None
    """World size of an elastic gang."""
    outcome: AttemptOutcome = AttemptOutcome.RUNNING
    failure: FailureClass | None = None
    counted: bool = False
    """Whether the attempt's failure consumed one of `run.maxRestarts`."""
    restarts: list[RestartInPod] = Field(default_factory=list, max_length=8)
    """Restarts of the ranks inside their pod, in a gang of one pod; each counts against `run.maxRestarts`."""
    interruptions: int = 0
    """How often a queue has preempted and resumed the attempt; never counted as a failure."""
    message: Text = ""
    hint: Text = ""
    evidence: list[RankFailure] = Field(default_factory=list, max_length=16)
    gpu_seconds: GpuSeconds | None = None
    """GPU seconds of the attempt's pods, written when it ends or a queue interrupts it; unset without GPUs."""


class FailureRow(StatusModel):
    """Restarts for one class of failure since the role last made progress."""

    failure: Annotated[str, StringConstraints(max_length=64)]
    """The failure class; a class that only another release knows is kept."""
    restarts: int = 0
    since: Timestamp = ""
    """When the first of these failures happened."""


class Restarts(StatusModel):
    """Restarts of a role so far."""

    counted: int = 0
    """Restarts for causes in the job itself; limited by `run.maxRestarts`."""
    uncounted: int = 0
    """Restarts for causes in the infrastructure; limited only while there is no progress in between."""
    in_a_row: int = 0
    """Restarts since the role last made progress: the pause before the next attempt grows with their number."""
    in_a_row_since: Timestamp = ""
    """When the first of these failures happened."""
    rows: list[FailureRow] = Field(default_factory=list, max_length=64)
    """Restarts by class of failure: each class has its own limit. Empty in the status of earlier releases."""
    at_checkpoint: int | None = None
    """Step of the newest checkpoint when the role last failed; a newer checkpoint is progress."""


class RoleRestarts(StatusModel):
    """Restarts of the roles other than training, each of which has its own budget."""

    fetch: Restarts = Restarts.model_construct()
    preflight: Restarts = Restarts.model_construct()
    merge: Restarts = Restarts.model_construct()
    publish: Restarts = Restarts.model_construct()


class ProgressStatus(StatusModel):
    """Latest progress of the training run."""

    step: int = 0
    total_steps: int = 0
    loss: Number = ""
    eval_loss: Number = ""
    initial_eval_loss: Number = ""
    tokens_per_second: Number = ""
    calculated_tokens_per_second: Number = ""
    """Tokens per second that the memory planner calculates for the devices of the run."""
    mfu: Number = ""
    goodput: Number = ""
    checkpoint_step: int | None = None
    checkpoint_time: Timestamp = ""
    """When the operator first heard of the newest checkpoint."""
    summary: Annotated[str, StringConstraints(max_length=64)] = ""
    """`step/total`, for the printer column."""
    advanced_time: Timestamp = ""
    """When the operator last saw the step change."""
    first_step_time: Timestamp = ""
    """When the operator first heard of an optimizer step."""


class Artifact(StatusModel):
    """A result at its destination."""

    name: Annotated[str, StringConstraints(max_length=64)]
    path: Text
    """Address of the result; outside the cluster with the commit or digest of this very content, since tags may move."""
    sha256: Annotated[str, StringConstraints(max_length=64)] = ""
    """SHA-256 of the artifact's manifest."""


class FineTuneJobStatus(StatusModel):
    """Everything that is known of a job."""

    observed_generation: int = 0
    phase: Annotated[str, StringConstraints(max_length=32)] = ""
    """Derived from the conditions for display; nothing depends on it."""
    conditions: list[Condition] = Field(default_factory=list, max_length=16)
    findings: list[Finding] = Field(default_factory=list, max_length=64)
    plan: PlanStatus | None = None
    memory: MemoryStatus | None = None
    """Set by preflight."""
    start_time: Timestamp = ""
    """When the plan was frozen; from then on only `spec.run` may change."""
    completion_time: Timestamp = ""
    attempt: int = 0
    """Number of the current attempt, from 0."""
    gang_nodes: int | None = None
    """Pods of the current attempt of an elastic gang. Unset: `parallelism.nodes`."""
    attempts: list[Attempt] = Field(default_factory=list, max_length=64)
    """The latest attempts of all roles, oldest first."""
    restarts: Restarts = Restarts.model_construct()
    """Restarts of the gang."""
    role_restarts: RoleRestarts = RoleRestarts.model_construct()
    """Restarts of the other roles."""
    progress: ProgressStatus | None = None
    artifacts: list[Artifact] = Field(default_factory=list, max_length=16)
    gpu_seconds: GpuSeconds | None = None
    """GPU seconds of all attempts of training; unset without GPUs and before the first attempt has ended."""
    gpu_seconds_until: Timestamp = ""
    """The time up to which `gpuSeconds` is counted."""
    suspended_seconds: int = 0
    """Seconds for which `run.suspend` has held the job since its start; not counted against `run.activeDeadlineSeconds`."""
    retry_handled: int = 0
    """Value of `run.retry` that was last acted upon."""
    fetch_attempt: int = 0
    """Number of the fetch Job, from 0."""
    preflight_attempt: int = 0
    """Number of the preflight Job, from 0; a retry after a refusal creates a new one."""
    merge_attempt: int = 0
    """Number of the merge Job, from 0."""
    publish_attempt: int = 0
    """Number of the publish Job, from 0."""

"""`status`: what the operator reports. Written by the operator alone, in one write per pass."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_job.api.base import ApiModel
from finetune_job.failures import FailureClass
from finetune_job.finding import MAX_TEXT_LENGTH, Finding
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType

Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_LENGTH)]
Timestamp = Annotated[str, StringConstraints(max_length=32)]
"""RFC 3339, UTC, whole seconds."""
Number = Annotated[str, StringConstraints(max_length=32)]
"""A number with a fraction, as text."""


class StatusModel(ApiModel):
    """Unknown fields are ignored: a newer operator may have written them."""

    model_config = ApiModel.model_config | {"extra": "ignore"}


class Condition(StatusModel):
    """As in Kubernetes' API conventions."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, StringConstraints(max_length=128)]
    message: Text = ""
    observed_generation: int = 0
    last_transition_time: Timestamp


class FineTuneProfileStatus(StatusModel):
    """What the operator says of a profile."""

    observed_generation: int = 0
    """Generation of the profile that was judged."""
    conditions: list[Condition] = Field(default_factory=list, max_length=8)
    """Ready: whether jobs can name it, and if not, why."""


class PlanChoice(StatusModel):
    """A value that the manifest left open and the plan fixed."""

    field: Text
    value: Text
    """As JSON."""
    reason: Text = ""


class PlanStatus(StatusModel):
    """The frozen plan. With the spec, in which the API server has filled its defaults in, `choices` are the effective
    settings.
    """

    hash: Annotated[str, StringConstraints(max_length=64)]
    """SHA-256 of the plan's canonical JSON."""
    trainer_image: Text = ""
    model_digest: Text = ""
    """Digest of the base model's files, by preflight."""
    data_hash: Text = ""
    """Digest of the prepared data, by preflight."""
    choices: list[PlanChoice] = Field(default_factory=list, max_length=64)
    """What was left open, and what it became."""


class MemoryStatus(StatusModel):
    """What a training rank needs, as preflight estimated it from the real model."""

    estimate: int
    """Bytes of the fullest rank: of its device, or of the pod's memory where there is none."""
    limit: int | None = None
    """Bytes that a rank may take, by the profile."""


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


class Attempt(StatusModel):
    """One try of a role: for training one run of the gang."""

    role: Role = Role.TRAIN
    number: int
    start_time: Timestamp = ""
    scheduled_time: Timestamp = ""
    """When the last of its pods had a node."""
    prepared_time: Timestamp = ""
    """When the last of its pods had its volumes and its network; what is left until it runs is the pull of the image."""
    running_time: Timestamp = ""
    """When the last of its pods began to run."""
    end_time: Timestamp = ""
    nodes: int | None = None
    """Pods of an elastic gang; unset for others, which always have `parallelism.nodes`."""
    ranks: int | None = None
    """World size of an elastic gang."""
    outcome: AttemptOutcome = AttemptOutcome.RUNNING
    failure: FailureClass | None = None
    counted: bool = False
    """Whether its failure consumed one of `run.maxRestarts`."""
    continued: bool = False
    """Whether the next attempt runs in the same pod, whose container was started again."""
    interruptions: int = 0
    """How often a queue has preempted and resumed it; never counted."""
    message: Text = ""
    hint: Text = ""
    evidence: list[RankFailure] = Field(default_factory=list, max_length=16)


class FailureRow(StatusModel):
    """Restarts for one class of failure since the role made progress last."""

    failure: Annotated[str, StringConstraints(max_length=64)]
    """The class; one that another release knows stays as it is."""
    restarts: int = 0
    since: Timestamp = ""
    """When the first of these failed."""


class Restarts(StatusModel):
    """Restarts of a role so far."""

    counted: int = 0
    """Caused by the job itself; limited by `run.maxRestarts`."""
    uncounted: int = 0
    """Caused by the infrastructure; limited while nothing is gained in between."""
    in_a_row: int = 0
    """Restarts since the role made progress last: the pause before the next attempt grows with them."""
    in_a_row_since: Timestamp = ""
    """When the first of these failed."""
    rows: list[FailureRow] = Field(default_factory=list, max_length=64)
    """The same by class of failure: each is given up by its own. Empty in what earlier releases wrote."""
    at_checkpoint: int | None = None
    """Step of the newest checkpoint when the role failed last; a newer one is progress."""


class RoleRestarts(StatusModel):
    """Restarts of the roles other than training, each with a budget of its own."""

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
    """What the planner calculates for the devices of the run."""
    mfu: Number = ""
    goodput: Number = ""
    checkpoint_step: int | None = None
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
    """Where it is; outside the cluster with the commit or digest that names this very content, wherever its tag moves later."""
    sha256: Annotated[str, StringConstraints(max_length=64)] = ""
    """Of the artifact's manifest."""


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
    """When the plan was frozen; from here on only `spec.run` may change."""
    completion_time: Timestamp = ""
    attempt: int = 0
    """Number of the current attempt, from 0."""
    gang_nodes: int | None = None
    """Pods of the current attempt of an elastic gang. Unset: `parallelism.nodes`."""
    attempts: list[Attempt] = Field(default_factory=list, max_length=64)
    """The latest attempts of all roles, oldest first."""
    restarts: Restarts = Restarts.model_construct()
    """Of the gang."""
    role_restarts: RoleRestarts = RoleRestarts.model_construct()
    """Of the other roles."""
    progress: ProgressStatus | None = None
    artifacts: list[Artifact] = Field(default_factory=list, max_length=16)
    suspended_seconds: int = 0
    """How long `run.suspend` has held the job back since its start; not counted against `run.activeDeadlineSeconds`."""
    retry_handled: int = 0
    """Value of `run.retry` that was acted upon last."""
    fetch_attempt: int = 0
    """Number of the fetch Job, from 0."""
    preflight_attempt: int = 0
    """Number of the preflight Job, from 0; a retry after a refusal makes a new one."""
    merge_attempt: int = 0
    """Number of the merge Job, from 0."""
    publish_attempt: int = 0
    """Number of the publish Job, from 0."""

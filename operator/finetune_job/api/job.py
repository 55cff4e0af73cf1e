"""The FineTuneJob that a user writes. Also here: `spec.preflight`, and `spec.run`, the only part that may change after the start.

`parse_job` reads every manifest. The spec of a started job is read even if this release would refuse it from a user: such a job
follows its plan, and only `run` and the names of claims are used from its spec.
"""

import copy
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from finetune_job.api.base import ApiModel
from finetune_job.api.inputs import DataSpec, FetchSpec, ModelSpec
from finetune_job.api.method import MethodSpec
from finetune_job.api.output import MergeSpec, OutputSpec, WorkspaceSpec
from finetune_job.api.parallelism import ParallelismSpec
from finetune_job.api.size import MAX_SPEC_BYTES, check_size
from finetune_job.api.training import CheckpointSpec, EvaluationSpec, TrainingSpec

MAX_ROUNDS = 8
"""Maximum number of times that wrong parts are removed: removing one may show what is wrong with another."""


class RunSpec(ApiModel):
    """Suspension, cancellation, restarts and deadlines."""

    suspend: bool = False
    """Release all pods and keep the checkpoint. Setting it back to false continues from there."""
    queue_name: Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] | None = None
    """Kueue LocalQueue of this namespace that admits the training Job. Unset: the profile's, if it names one."""
    priority_class_name: Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] | None = (
        None
    )
    """Priority of the training: under a queue the WorkloadPriorityClass of its Job, without one the PriorityClass of its pods.
    Unset: the profile's, if it names one."""
    cancel: bool = False
    """End the job for good. This cannot be undone."""
    retry: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Increase it to try again after `Stalled`."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 3
    """Maximum number of restarts of the gang after failures that are not caused by the infrastructure."""
    startup_deadline_seconds: Annotated[int, Field(ge=10, le=604_800)] = 1800
    """Seconds within which all pods of a role must run once there is room for them; waiting in a queue or for capacity does not
    count."""
    stall_deadline_seconds: Annotated[int, Field(ge=60, le=604_800)] | None = None
    """Seconds without a new step, while all pods are running, after which the gang is restarted; such a restart counts.
    Unset: only the ranks' own watchdog (training.stepTimeoutSeconds) ends a run that hangs."""
    active_deadline_seconds: Annotated[int, Field(ge=10, le=31_536_000)] | None = None
    """Time limit of the whole job in seconds from its start. Unset: no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Seconds after the end until the job's pods and Jobs are deleted; the FineTuneJob itself stays. Unset: never."""


class Rehearsal(StrEnum):
    """Whether preflight tries the job on a scaled-down model."""

    RUN = "Run"
    SKIP = "Skip"


class PreflightSpec(ApiModel):
    """What is tried before any GPU is taken."""

    rehearsal: Rehearsal = Rehearsal.RUN
    """Run: a scaled-down model with few layers and small widths is trained, saved, resumed and merged with the job's settings on
    two CPU ranks. Skip: only rules and structure are checked."""


class FineTuneJobSpec(ApiModel):
    """One fine-tuning run: from a base model and data to a merged, verified model."""

    profile: Annotated[str, StringConstraints(max_length=253, min_length=1)] | None = None
    """FineTuneProfile with images, resources and limits. Unset: `default`."""
    model: ModelSpec
    """Base model."""
    data: DataSpec
    """Training and held-out records."""
    fetch: FetchSpec = FetchSpec.model_construct()
    """Credentials for sources outside the cluster."""
    method: MethodSpec = MethodSpec.model_construct()
    """Fine-tuning method."""
    training: TrainingSpec
    """Optimisation."""
    parallelism: ParallelismSpec = ParallelismSpec.model_construct()
    """Nodes, ranks and sharding."""
    checkpoint: CheckpointSpec = CheckpointSpec.model_construct()
    """Checkpoints."""
    evaluation: EvaluationSpec = EvaluationSpec.model_construct()
    """Held-out loss."""
    merge: MergeSpec = MergeSpec.model_construct()
    """Merging and verification."""
    output: OutputSpec
    """Results."""
    workspace: WorkspaceSpec
    """Working storage."""
    preflight: PreflightSpec = PreflightSpec.model_construct()
    """What is tried before any GPU is taken."""
    run: RunSpec = RunSpec.model_construct()
    """Suspension, cancellation, restarts and deadlines."""

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, content: Any) -> Any:
        check_size(content, MAX_SPEC_BYTES)
        return content


class ObjectMeta(ApiModel):
    """The part of the metadata that is read here; the rest concerns only Kubernetes."""

    model_config = ApiModel.model_config | {"extra": "ignore"}
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", max_length=63)]
    namespace: Annotated[str, StringConstraints(max_length=63)] = "default"
    uid: Annotated[str, StringConstraints(max_length=253)] = ""
    generation: int = 0


class FineTuneJob(ApiModel):
    """A FineTuneJob as written in a manifest; status is read separately."""

    api_version: Literal["finetune.dev/v1alpha1"]
    kind: Literal["FineTuneJob"]
    metadata: ObjectMeta
    spec: FineTuneJobSpec
    status: Annotated[dict[str, Any] | None, Field(exclude=True)] = None


def parse_job(document: Any) -> FineTuneJob:
    """Parse a decoded manifest. Raises pydantic.ValidationError, which names every wrong field."""
    return FineTuneJob.model_validate(document)


def spec_of_started_job(content: Any) -> FineTuneJobSpec | None:
    """Return the spec without the parts that cannot be read; None if the rest cannot be read either."""
    content = copy.deepcopy(content)
    for _ in range(MAX_ROUNDS):
        try:
            return FineTuneJobSpec.model_validate(content)
        except ValidationError as error:
            refused = [item["loc"] for item in error.errors(include_url=False, include_context=False, include_input=False)]
        # Remove from the end, so that the indices of list items stay right.
        removed = [_remove(content, path) for path in reversed(refused)]
        if not any(removed):
            return None
    return None


def _remove(content: Any, path: tuple[int | str, ...]) -> bool:
    """Remove the value at the path, or the last part of the path that exists. Returns False if not even the first part exists."""
    target = None
    for name in path:
        is_there = name in content if isinstance(content, dict) else isinstance(content, list) and name in range(len(content))
        if not is_there:
            break
        target, content = (content, name), content[name]
    if target is None:
        return False
    holder, name = target
    del holder[name]
    return True

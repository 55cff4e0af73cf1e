"""The FineTuneJob: what a user writes. `parse_job` is the one way in for manifests and for objects from the API server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from finetune_job.api.base import ApiModel
from finetune_job.api.data import DataSpec
from finetune_job.api.fetch import FetchSpec
from finetune_job.api.method import MethodSpec
from finetune_job.api.model import ModelSpec
from finetune_job.api.output import MergeSpec, OutputSpec, WorkspaceSpec
from finetune_job.api.parallelism import ParallelismSpec
from finetune_job.api.run import PreflightSpec, RunSpec
from finetune_job.api.size import MAX_SPEC_BYTES, check_size
from finetune_job.api.training import CheckpointSpec, EvaluationSpec, TrainingSpec


class FineTuneJobSpec(ApiModel):
    """One fine-tuning run: from a base model and data to a merged, verified model."""

    profile: Annotated[str, StringConstraints(max_length=253, min_length=1)] | None = None
    """FineTuneProfile with images, resources and limits. Unset: `default`."""
    model: ModelSpec
    """Base model."""
    data: DataSpec
    """Training and held-out records."""
    fetch: FetchSpec = FetchSpec()
    """Credentials for sources outside the cluster."""
    method: MethodSpec = MethodSpec()
    """Fine-tuning method."""
    training: TrainingSpec
    """Optimisation."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """Nodes, ranks and sharding."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out loss."""
    merge: MergeSpec = MergeSpec()
    """Merging and verification."""
    output: OutputSpec
    """Results."""
    workspace: WorkspaceSpec
    """Working storage."""
    preflight: PreflightSpec = PreflightSpec()
    """What is tried before any GPU is taken."""
    run: RunSpec = RunSpec()
    """Suspension, cancellation, restarts and deadlines."""

    @model_validator(mode="before")
    @classmethod
    def _can_be_stored(cls, content: Any) -> Any:
        check_size(content, MAX_SPEC_BYTES)
        return content


class ObjectMeta(ApiModel):
    """The part of metadata that we read; the rest is Kubernetes' affair."""

    model_config = ApiModel.model_config | {"extra": "ignore"}
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", max_length=63)]
    namespace: Annotated[str, StringConstraints(max_length=63)] = "default"
    uid: Annotated[str, StringConstraints(max_length=253)] = ""
    generation: int = 0


class FineTuneJob(ApiModel):
    """A FineTuneJob as written in a manifest; status is read apart."""

    api_version: Literal["finetune.dev/v1alpha1"]
    kind: Literal["FineTuneJob"]
    metadata: ObjectMeta
    spec: FineTuneJobSpec
    status: Annotated[dict[str, Any] | None, Field(exclude=True)] = None


def parse_job(document: Any) -> FineTuneJob:
    """A job from a decoded manifest. Raises pydantic.ValidationError naming every wrong field."""
    return FineTuneJob.model_validate(document)

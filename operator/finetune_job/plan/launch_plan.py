"""What the operator reads of a frozen plan: as much as it builds children from and follows a run by, and nothing else.

The plan may come from any release, an earlier one or, after a rollback, a later one. Each class here is the base of the one that
a container reads, so that one field has one definition; what only a container needs (methods, optimizers, sharding) is left out,
so that a value that this release has never heard of cannot stop a run.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from finetune_job.api.base import ClaimPath
from finetune_job.plan.placement import Placement
from finetune_job.plan.plan_model import PlanModel
from finetune_job.plan.transfers import FetchPlan, PublishPlan

_TRAINING_DATA, _HELD_OUT_DATA = "spec.data.source", "spec.data.validation.source"


class PlacedModel(PlanModel):
    """Base model."""

    location: ClaimPath
    """Where it lies: on the user's claim, or where fetch puts it on the workspace."""


class PlacedRecords(PlanModel):
    """A file or directory of records."""

    location: ClaimPath
    """Where it lies: on the user's claim, or where fetch puts it on the workspace."""
    field: str
    """Where the user named it, such as `spec.data.datasets[0].source`, for messages."""


class PlacedData(PlanModel):
    """Training and held-out records."""

    train: tuple[PlacedRecords, ...]
    validation: PlacedRecords | None

    @model_validator(mode="before")
    @classmethod
    def _of_one_claim(cls, content: Any) -> Any:
        """The first releases knew one source for training, and wrote its place alone."""
        if not isinstance(content, dict) or not isinstance(content.get("train"), dict):
            return content
        held_out = content.get("validation")
        return content | {
            "train": [_one_source(content["train"], _TRAINING_DATA)],
            "validation": None if held_out is None else _one_source(held_out, _HELD_OUT_DATA),
        }


def _one_source(location: dict[str, Any], field: str) -> dict[str, Any]:
    return {"location": location, "source": claim_source(location), "field": field, "weight": 1.0}


def claim_source(location: dict[str, Any]) -> str:
    """A path on a claim as users write it."""
    return f"pvc://{location.get('claim', '')}/{location.get('path', '')}"


class TrainedParts(PlanModel):
    """Fine-tuning method: what is trained."""

    lora: Any = None
    adapter: Any = None

    @property
    def trains_adapter(self) -> bool:
        """Whether something beside a frozen base is trained."""
        return self.lora is not None or self.adapter is not None


class Ranks(PlanModel):
    """Pods and ranks of the gang."""

    nodes: int
    processes_per_node: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.processes_per_node


class CheckpointInterval(PlanModel):
    """When a checkpoint is due: after so many steps or seconds, whichever comes first."""

    every_steps: int
    every_seconds: int | None = None
    """None: steps alone."""


class MergeSwitch(PlanModel):
    """Merge and verification."""

    enabled: bool


class LaunchPlan(PlanModel):
    """The part of a RunPlan that decides which children a job has, and how far a run is from what it can resume from."""

    version: Literal[1] = 1
    model: PlacedModel
    data: PlacedData
    fetch: FetchPlan | None = None
    """None: everything lies on claims."""
    method: TrainedParts
    parallelism: Ranks
    checkpoint: CheckpointInterval
    merge: MergeSwitch
    workspace: ClaimPath
    """Directory of this job on the workspace claim."""
    output: ClaimPath
    """Directory of the results: on the user's claim, or on the workspace, from where they are published."""
    keeps_adapter: bool = True
    """Whether the adapter is among the results beside a merged model."""
    publish: PublishPlan | None = None
    """None: the results lie where they belong."""
    placement: Placement | None
    """None in local mode."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is among the results."""
        return self.method.trains_adapter and self.keeps_adapter

    @property
    def has_merged(self) -> bool:
        """Whether a whole model is among the results: merged, or trained whole."""
        return self.merge.enabled or not self.method.trains_adapter


def read_launch_plan(text: str) -> LaunchPlan:
    """The operator's part of a plan of any release. Raises pydantic.ValidationError."""
    return LaunchPlan.model_validate_json(text, extra="ignore")

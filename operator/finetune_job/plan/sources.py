"""What a job reads: the one list of its sources, by the fields that name them."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.base import ClaimPath
from finetune_job.api.data import Dataset, DataSpec
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.launch_plan import LaunchPlan


@dataclass(frozen=True)
class NamedSource:
    """A source as the manifest names it."""

    field: str
    """Path under `spec`, such as `data.datasets[0].source`."""
    source: str
    revision_field: str
    revision: str | None
    is_model: bool


def training_sets(data: DataSpec) -> list[tuple[str, Dataset]]:
    """The training data sets with the paths under `spec` that hold them; none where the manifest names none, which is refused."""
    if data.datasets is not None:
        return [(f"data.datasets[{number}]", dataset) for number, dataset in enumerate(data.datasets)]
    return [] if data.source is None else [("data", Dataset(source=data.source, revision=data.revision))]


def named_sources(spec: FineTuneJobSpec) -> list[NamedSource]:
    """Every source of a manifest: model, training data, held-out data."""
    found = [NamedSource("model.source", spec.model.source, "model.revision", spec.model.revision, is_model=True)]
    sets = [(path, dataset.source, dataset.revision) for path, dataset in training_sets(spec.data)]
    if spec.data.validation is not None:
        sets.append(("data.validation", spec.data.validation.source, spec.data.validation.revision))
    found += [
        NamedSource(f"{path}.source", source, f"{path}.revision", revision, is_model=False) for path, source, revision in sets
    ]
    return found


def input_locations(plan: LaunchPlan) -> list[tuple[str, ClaimPath]]:
    """Where a plan's model and data lie, with the fields that named them."""
    held_out = [] if plan.data.validation is None else [plan.data.validation]
    return [
        ("spec.model.source", plan.model.location),
        *((dataset.field, dataset.location) for dataset in (*plan.data.train, *held_out)),
    ]

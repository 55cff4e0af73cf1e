"""What a job reads: its sources by the fields that name them, and the parts of a plan on fetching and on data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune_job.api.base import ClaimPath, HubPath, parse_source
from finetune_job.api.inputs import DataFormat, Dataset, DataSpec, LossOn, ModelSpec
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec
from finetune_job.layout import WorkspaceLayout
from finetune_job.plan.launch_plan import FetchItem, FetchPlan, LaunchPlan, SecretKey
from finetune_job.plan.run_plan import Choices, DataPlan, DatasetPlan

_LOSS_ON = {
    DataFormat.CHAT: (LossOn.ASSISTANT, "the model is to answer as the assistant does"),
    DataFormat.PROMPT_COMPLETION: (LossOn.COMPLETION, "the prompt is given, not learnt"),
    DataFormat.TEXT: (LossOn.ALL, "plain text has no prompt"),
}


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
    """Where a plan's model and data are, with the fields that named them."""
    held_out = [] if plan.data.validation is None else [plan.data.validation]
    return [
        ("spec.model.source", plan.model.location),
        *((dataset.field, dataset.location) for dataset in (*plan.data.train, *held_out)),
    ]


class SourceLocations:
    """Where sources are: on their claims, or under the workspace's `sources`, to which they are fetched."""

    def __init__(self, workspace: ClaimPath) -> None:
        self._sources = WorkspaceLayout(Path(workspace.path)).sources
        self._claim = workspace.claim
        self.items: list[FetchItem] = []

    def of(self, source: str, revision: str | None, name: str) -> ClaimPath:
        """The place of `source`; one from outside the cluster is put down for fetching as `name`."""
        parsed = parse_source(source)
        if isinstance(parsed, ClaimPath):
            return parsed
        target = ClaimPath(claim=self._claim, path=str(self._sources / name))
        self.items.append(FetchItem(source=source, revision=revision, target=target))
        return target


def base_model_name(model: ModelSpec) -> str:
    parsed = parse_source(model.source)
    return parsed.repository if isinstance(parsed, HubPath) else model.hub_name or model.source


def fetch_plan(spec: FineTuneJobSpec, profile: FineTuneProfileSpec | None, places: SourceLocations) -> FetchPlan | None:
    """Called after every source has been given its place."""
    if not places.items:
        return None
    settings = profile.fetch if profile is not None else FetchSettings()
    token, bucket = spec.fetch.hub_token_secret_ref, spec.fetch.s3_secret_ref
    return FetchPlan(
        items=tuple(places.items),
        hub_endpoint=settings.hub_endpoint,
        s3_endpoint=settings.s3_endpoint,
        s3_region=settings.s3_region,
        hub_token=None if token is None else SecretKey(name=token.name, key=token.key),
        s3_secret=None if bucket is None else bucket.name,
    )


def data_plan(spec: FineTuneJobSpec, choices: Choices, places: SourceLocations) -> DataPlan:
    sets = training_sets(spec.data)
    held_out = spec.data.validation
    loss_on, reason = _LOSS_ON[spec.data.format]
    return DataPlan(
        train=tuple(
            DatasetPlan(
                location=places.of(dataset.source, dataset.revision, f"data-{number}"),
                source=dataset.source,
                field=f"spec.{path}.source",
                weight=float(dataset.weight),
            )
            for number, (path, dataset) in enumerate(sets)
        ),
        validation=None
        if held_out is None
        else DatasetPlan(
            location=places.of(held_out.source, held_out.revision, "validation"),
            source=held_out.source,
            field="spec.data.validation.source",
            weight=1.0,
        ),
        format=spec.data.format,
        chat_template=spec.data.chat_template,
        max_sequence_length=spec.data.max_sequence_length,
        packing=spec.data.packing,
        loss_on=choices.pick(
            "data.lossOn",
            spec.data.loss_on,
            loss_on,
            reason,
        ),
    )

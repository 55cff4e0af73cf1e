"""The inputs of a job: its sources, the fields that name them, and the parts of the plan for fetching and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic.alias_generators import to_camel

from finetune_job.api.base import ClaimPath, HubPath, parse_source
from finetune_job.api.inputs import DataFormat, DataMapping, Dataset, DataSpec, LossOn, ModelSpec, TextUnit, ValidationData
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec
from finetune_job.chat_templates import TEMPLATES
from finetune_job.layout import WorkspaceLayout
from finetune_job.plan.choices import Choices
from finetune_job.plan.launch_plan import FetchItem, FetchPlan, LaunchPlan, SecretKey
from finetune_job.plan.mapping import OF_FORMAT, SEPARATOR, MappingPlan, makes_chats_of_pairs, mapped_fields
from finetune_job.plan.run_plan import Choice, DataPlan, DatasetPlan

TRAIN_SPLIT = "train"
HELD_OUT_SPLITS = ("validation", "test")
FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow", ".txt")
"""Suffixes of record files; a source with any other suffix may be a directory."""

_LOSS_ON = {
    DataFormat.CHAT: (LossOn.ASSISTANT, "the model is to answer as the assistant does"),
    DataFormat.PROMPT_COMPLETION: (LossOn.COMPLETION, "the prompt is given, not learnt"),
    DataFormat.TEXT: (LossOn.ALL, "plain text has no prompt"),
}


@dataclass(frozen=True)
class NamedSource:
    """A source as written in the manifest."""

    field: str
    """Path under `spec`, such as `data.datasets[0].source`."""
    source: str
    revision_field: str
    revision: str | None
    is_model: bool


def training_sets(data: DataSpec) -> list[tuple[str, Dataset]]:
    """Return the training data sets with their paths under `spec`. If the manifest names none, a rule refuses the job."""
    if data.datasets is not None:
        return [(f"data.datasets[{number}]", dataset) for number, dataset in enumerate(data.datasets)]
    return [] if data.source is None else [("data", Dataset(source=data.source, revision=data.revision))]


def named_sources(spec: FineTuneJobSpec) -> list[NamedSource]:
    """Return every source of a manifest: model, training data, held-out data."""
    sources = [NamedSource("model.source", spec.model.source, "model.revision", spec.model.revision, is_model=True)]
    sets = [(path, dataset.source, dataset.revision) for path, dataset in training_sets(spec.data)]
    if spec.data.validation is not None:
        sets.append(("data.validation", spec.data.validation.source, spec.data.validation.revision))
    sources += [
        NamedSource(f"{path}.source", source, f"{path}.revision", revision, is_model=False) for path, source, revision in sets
    ]
    return sources


def input_locations(plan: LaunchPlan) -> list[tuple[str, ClaimPath]]:
    """Return the locations of a plan's model and data, each with the field that names it."""
    held_out = [] if plan.data.validation is None else [plan.data.validation]
    return [
        ("spec.model.source", plan.model.location),
        *((dataset.field, dataset.location) for dataset in (*plan.data.train, *held_out)),
    ]


class SourceLocations:
    """Locates sources: on their claims or, if they are fetched, in the workspace's `sources` directory."""

    def __init__(self, workspace: ClaimPath) -> None:
        self._sources = WorkspaceLayout(Path(workspace.path)).sources
        self._claim = workspace.claim
        self.items: list[FetchItem] = []

    def of(self, source: str, revision: str | None, name: str) -> ClaimPath:
        """Return the location of `source`. If it is outside the cluster, also schedule it to be fetched as `name`."""
        parsed = parse_source(source)
        if isinstance(parsed, ClaimPath):
            return parsed
        target = ClaimPath(claim=self._claim, path=str(self._sources / name))
        self.items.append(FetchItem(source=source, revision=revision, target=target))
        return target


def base_model_name(model: ModelSpec, choices: Choices, *, trains_adapter: bool) -> str:
    """Return the base model's name. trains_adapter: whether adapter_config.json will name it as the base."""
    parsed = parse_source(model.source)
    if isinstance(parsed, HubPath):
        return parsed.repository
    if not trains_adapter:
        return model.hub_name or model.source
    reason = "an adapter names this as its base if config.json has no _name_or_path, and AutoPeftModel cannot load it"
    return choices.pick("model.hubName", model.hub_name, model.source, reason)


def fetch_plan(spec: FineTuneJobSpec, profile: FineTuneProfileSpec | None, places: SourceLocations) -> FetchPlan | None:
    """Plan the fetch; None if there is nothing to fetch. Call this after every source has been located."""
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
    data, held_out = spec.data, spec.data.validation
    sets = training_sets(data)
    loss_on, reason = _LOSS_ON[data.format]
    return DataPlan(
        train=tuple(
            DatasetPlan(
                location=places.of(dataset.source, dataset.revision, f"data-{number}"),
                source=dataset.source,
                field=f"spec.{path}.source",
                weight=float(dataset.weight),
                splits=(_split(choices, [dataset.source for _, dataset in sets], data.split),),
                split_is_chosen=data.split is not None,
            )
            for number, (path, dataset) in enumerate(sets)
        ),
        validation=None if held_out is None else _held_out(held_out, choices, places),
        format=data.format,
        mapping=_mapping_plan(data, choices),
        chat_template=None if data.chat_template is None else TEMPLATES.get(data.chat_template, data.chat_template),
        template_arguments=data.template_arguments or {},
        max_sequence_length=data.max_sequence_length,
        packing=data.packing,
        on_invalid_record=data.on_invalid_record,
        loss_on=choices.pick("data.lossOn", data.loss_on, loss_on, reason),
    )


def _split(choices: Choices, sources: Sequence[str], given: str | None) -> str:
    """Return the training split. A default is recorded as a choice, but only once, and only if a source may be a directory."""
    if given is not None or all(map(_is_file, sources)) or any(made.field == "spec.data.split" for made in choices.made):
        return given or TRAIN_SPLIT
    return choices.pick("data.split", None, TRAIN_SPLIT, "files that are named after another split are not for training")


def _held_out(held_out: ValidationData, choices: Choices, places: SourceLocations) -> DatasetPlan:
    splits: tuple[str, ...] = HELD_OUT_SPLITS
    if held_out.split is not None:
        splits = (held_out.split,)
    elif not _is_file(held_out.source):
        choices.pick(
            "data.validation.split", None, splits[0], f"these are the held-out files of a directory, or those of {splits[1]}"
        )
    return DatasetPlan(
        location=places.of(held_out.source, held_out.revision, "validation"),
        source=held_out.source,
        field="spec.data.validation.source",
        weight=1.0,
        splits=splits,
        split_is_chosen=held_out.split is not None,
    )


def _is_file(source: str) -> bool:
    return source.lower().endswith(FILE_SUFFIXES)


def _mapping_plan(data: DataSpec, choices: Choices) -> MappingPlan:
    """Resolve the names used in the records; names that come from a preset are recorded as choices."""
    mapping = data.mapping or DataMapping()
    fields = {name: value for name, value in mapped_fields(mapping).items() if name in OF_FORMAT[data.format]}
    if mapping.preset is not None:
        for name, value in fields.items():
            if getattr(mapping, name) != value:
                choices.made.append(
                    Choice(field=f"spec.data.mapping.{to_camel(name)}", value=value, reason=f"from the preset {mapping.preset}")
                )
    if data.format is DataFormat.TEXT:
        reason = "blank lines separate the records of .txt files"
        fields["text_unit"] = choices.pick("data.mapping.textUnit", mapping.text_unit, TextUnit.PARAGRAPH, reason)
    if "separator" in OF_FORMAT[data.format] and {"prompt", "completion", "input"} & fields.keys():
        reason = "without it the last word of one text and the first of the next would run together"
        fields["separator"] = choices.pick("data.mapping.separator", mapping.separator, SEPARATOR, reason)
    return MappingPlan.model_validate({**fields, "chat_of_pair": makes_chats_of_pairs(data.mapping, data.format)})

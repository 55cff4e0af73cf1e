"""The part of a plan that says what is read: where it lies, what is fetched first, how records become tokens."""

from __future__ import annotations

from pathlib import Path

from finetune_job.api.base import ClaimPath, HubPath, parse_source
from finetune_job.api.data import DataFormat, LossOn
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec
from finetune_job.layout import WorkspaceLayout
from finetune_job.plan.choices import Choices
from finetune_job.plan.run_plan import DataPlan, DatasetPlan
from finetune_job.plan.sources import training_sets
from finetune_job.plan.transfers import FetchItem, FetchPlan, SecretKey


class Places:
    """Where sources lie: on their claims, or under the workspace's `sources`, to which they are fetched."""

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


def model_name(source: str) -> str:
    parsed = parse_source(source)
    return parsed.repository if isinstance(parsed, HubPath) else source


def fetch_plan(spec: FineTuneJobSpec, profile: FineTuneProfileSpec | None, places: Places) -> FetchPlan | None:
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


_LOSS_ON = {
    DataFormat.CHAT: (LossOn.ASSISTANT, "the model is to answer as the assistant does"),
    DataFormat.PROMPT_COMPLETION: (LossOn.COMPLETION, "the prompt is given, not learnt"),
    DataFormat.TEXT: (LossOn.ALL, "plain text has no prompt"),
}


def data_plan(spec: FineTuneJobSpec, choices: Choices, places: Places) -> DataPlan:
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

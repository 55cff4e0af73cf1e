"""Where models and data come from, at which state, whose code runs, and what credentials reading takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from finetune_job.api.base import HUB_DATASETS, BucketPath, ClaimPath, HubPath, parse_source
from finetune_job.api.profile import is_allowed
from finetune_job.plan.inputs import NamedSource, named_sources, training_sets
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import SAME_PLAN, NoEffect, no_effect_rules

_DATASETS = "data.datasets"
SOURCES = ("model.source", "data.source", _DATASETS, "data.validation.source")
"""Fields that name sources."""
_REVISIONS = ("model.revision", "data.revision", _DATASETS, "data.validation.revision")
NO_COMMIT = "0" * 40
"""Stands where only the user can know the commit; no repository has it, so fetching it fails by name."""
_NUMBER = re.compile(r"data\.datasets\[(\d+)\]")
_ALLOW = "model.allowRemoteCode"


@dataclass(frozen=True)
class _SourceEdit:
    """A source as it should be written."""

    named: NamedSource
    source: str
    revision: str | None


def _field(path: str) -> str:
    """The field that a finding names: findings know lists as a whole."""
    return _DATASETS if _NUMBER.match(path) else path


def _changes(context: RuleContext, edits: Sequence[_SourceEdit]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    datasets = [
        dataset.model_dump(mode="json", by_alias=True, exclude_unset=True) for _, dataset in training_sets(context.spec.data)
    ]
    for edit in edits:
        number = _NUMBER.match(edit.named.field)
        if number is None:
            written: dict[str, str | None] = {edit.named.field: edit.source, edit.named.revision_field: edit.revision}
            before = {edit.named.field: edit.named.source, edit.named.revision_field: edit.named.revision}
            changes |= {path: value for path, value in written.items() if value != before[path]}
        else:
            dataset = datasets[int(number[1])]
            dataset["source"] = edit.source
            dataset.pop("revision", None)
            if edit.revision is not None:
                dataset["revision"] = edit.revision
            changes[_DATASETS] = datasets
    return changes


def _problem(
    context: RuleContext, edits: Sequence[_SourceEdit], message: str, fix: str, *, of_revision: bool = False
) -> Problem | None:
    """What is wrong with the first of the sources, and changes that set all of them right."""
    if not edits:
        return None
    first = edits[0].named
    path = first.revision_field if of_revision else first.field
    shown = f"{path} of {first.source}" if of_revision else f"{path}: {first.source}"
    return Problem(
        field=_field(path),
        value=first.revision if of_revision else first.source,
        message=f"{shown}: {message}",
        fix=fix,
        changes=_changes(context, edits),
    )


def commit_command(place: HubPath) -> str:
    """Prints the newest commit of a repository on the Hub."""
    kind = HUB_DATASETS if place.is_dataset else ""
    return f"git ls-remote https://huggingface.co/{kind}{place.repository} HEAD"


@rule(
    "hub-source-without-revision",
    "A repository on the Hub is read at a commit",
    reads=_REVISIONS,
    sources=("Hugging Face Hub: branches and tags can be moved, commits cannot",),
    reproduction=Reproduction(
        "tests/pitfalls/test_sources.py::test_without_a_commit_nothing_is_fetched",
        "InvariantError: the source 'has no revision'; the branch itself names another commit after the next change",
    ),
    holds_for=OURS,
    needs_human=True,
)
def hub_source_without_revision(context: RuleContext) -> Problem | None:
    edits = [
        _SourceEdit(named, named.source, NO_COMMIT)
        for named in named_sources(context.spec)
        if isinstance(parse_source(named.source), HubPath) and named.revision is None
    ]
    places = [place for edit in edits if isinstance(place := parse_source(edit.source), HubPath)]
    return _problem(
        context,
        edits,
        "without a commit, a restarted job could read other files than it started with",
        f"set it to the 40 digits that `{commit_command(places[0])}` prints" if places else "",
        of_revision=True,
    )


@rule(
    "revision-without-hub-source",
    "Only a repository on the Hub has revisions",
    reads=_REVISIONS,
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_no_effect.py::test_what_nothing_reads",
        "no error: the run's plan is the same with and without it",
    ),
    holds_for=OURS,
)
def revision_without_hub_source(context: RuleContext) -> Problem | None:
    edits = [
        _SourceEdit(named, named.source, None)
        for named in named_sources(context.spec)
        if not isinstance(parse_source(named.source), HubPath) and named.revision is not None
    ]
    return _problem(
        context,
        edits,
        "a claim or a bucket has no commits, so the revision would be ignored",
        "remove the revision; the content of a bucket is recorded when it is copied",
        of_revision=True,
    )


@rule(
    "hub-name-with-hub-source",
    "A repository on the Hub names itself",
    reads=("model.hubName", "model.source"),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_no_effect.py::test_what_nothing_reads",
        "no error: the run's plan is the same with and without it",
    ),
    holds_for=OURS,
)
def hub_name_with_hub_source(context: RuleContext) -> Problem | None:
    name, place = context.spec.model.hub_name, parse_source(context.spec.model.source)
    if name is None or not isinstance(place, HubPath):
        return None
    return Problem(
        field="model.hubName",
        value=name,
        message=f"the source is {place.repository} of the Hub, which is the name that the adapter gets",
        fix="remove it; it is for copies of a model on a claim or in a bucket",
        changes={"model.hubName": None},
    )


@rule(
    "model-source-is-dataset",
    "A model is not a data set",
    reads=("model.source",),
    sources=("Hugging Face Hub: models and data sets are repositories of different kinds",),
    reproduction=Reproduction(
        "tests/pitfalls/test_sources.py::test_a_data_set_is_no_model",
        "ModelError: the repository 'holds no safetensors file', or access to a data set of that name is refused",
    ),
    holds_for=OURS,
)
def model_source_is_dataset(context: RuleContext) -> Problem | None:
    return _problem(
        context,
        [edit for edit in _model_edits(context) if edit.named.source.removeprefix("hf://").startswith(HUB_DATASETS)],
        f"hf://{HUB_DATASETS} names a data set, and a base model is wanted",
        "write hf://<organisation>/<model>",
    )


@rule(
    "model-source-inside-repository",
    "A model is a whole repository",
    reads=("model.source",),
    sources=("peft: an adapter's base_model_name_or_path is a repository, and has no word for a directory of it",),
    reproduction=Reproduction(
        "tests/pitfalls/test_sources.py::test_the_adapter_would_name_another_base",
        "no error: adapter and model card name the repository, whose top is another model",
    ),
    holds_for=OURS,
)
def model_source_inside_repository(context: RuleContext) -> Problem | None:
    return _problem(
        context,
        [edit for edit in _model_edits(context) if _path_of(edit.named) != ""],
        "it names a directory inside a repository, and the adapter would name the repository as its base, whose top is another",
        "write hf://<organisation>/<model>; copy a model in a directory to a claim or a bucket",
    )


def _model_edits(context: RuleContext) -> list[_SourceEdit]:
    """The model's source as a whole repository of the Hub, if it is on the Hub."""
    return [
        _SourceEdit(named, f"hf://{place.repository}", named.revision)
        for named in named_sources(context.spec)
        if named.is_model and isinstance(place := parse_source(named.source), HubPath)
    ]


def _path_of(named: NamedSource) -> str:
    place = parse_source(named.source)
    return place.path if isinstance(place, HubPath) else ""


@rule(
    "data-source-is-model",
    "A model's repository is not a data set",
    reads=("data.source", _DATASETS, "data.validation.source"),
    sources=("Hugging Face Hub: models and data sets are repositories of different kinds",),
    reproduction=Reproduction(
        "tests/pitfalls/test_sources.py::test_a_data_set_is_not_found_among_models "
        "tests/pitfalls/test_sources.py::test_a_whole_model_is_no_records_and_a_part_of_one_may_be",
        "DataError: access to a model of that name is refused; of a model that is there, config.json is read as records",
    ),
    holds_for=OURS,
)
def data_source_is_model(context: RuleContext) -> Problem | None:
    """Of whole repositories: a file or directory of a model's repository may well hold records."""
    edits = [
        _SourceEdit(named, f"hf://{HUB_DATASETS}{named.source.removeprefix('hf://')}", named.revision)
        for named in named_sources(context.spec)
        if not named.is_model
        and isinstance(place := parse_source(named.source), HubPath)
        and not (place.is_dataset or place.path)
    ]
    return _problem(
        context,
        edits,
        f"hf:// without {HUB_DATASETS} names a model, whose files are not records",
        f"write {edits[0].source}, or name the file or directory of the model's repository that holds records" if edits else "",
    )


class _CopyLocations:
    """Places on claims for copies of sources; no two sources have one, or held-out records would be those that are trained on."""

    def __init__(self, context: RuleContext) -> None:
        self._copied = {named.source.rstrip("/"): named.source.rstrip("/") for named in named_sources(context.spec)}

    def of(self, named: NamedSource) -> str:
        source = named.source.rstrip("/")
        # The key of an object may have letters that a path on a claim has not.
        name = re.sub(r"[^A-Za-z0-9._-]", "-", source.rpartition("/")[2])
        stem, dot, suffix = name.rpartition(".")
        beginning, end = (stem, dot + suffix) if stem else (name, "")
        names = chain([name], (f"{beginning}-{number}{end}" for number in count(1)))
        places = (f"pvc://{'models' if named.is_model else 'data'}/{each}" for each in names)
        return next(place for place in places if self._copied.setdefault(place, source) == source)


@rule(
    "source-not-allowed",
    "The profile lets only some sources through",
    reads=SOURCES,
    sources=("this product's FineTuneProfile",),
    holds_for=OURS,
    not_reproduced="no library fails: what the profile allows is up to administrators",
)
def source_not_allowed(context: RuleContext) -> Problem | None:
    if context.profile is None:
        return None
    allowed = context.profile.fetch.allowed_sources or []
    places = _CopyLocations(context)
    edits = [
        _SourceEdit(named, places.of(named), None)
        for named in named_sources(context.spec)
        if not isinstance(parse_source(named.source), ClaimPath) and not is_allowed(named.source, allowed)
    ]
    listed = ", ".join(allowed) or "no source outside the cluster"
    return _problem(
        context,
        edits,
        f"fetch.allowedSources of the profile: {listed}",
        "copy it to a claim, or ask for a profile that allows it",
    )


@rule(
    "remote-code-not-allowed",
    "The profile does not let a model's own code run",
    reads=(_ALLOW,),
    sources=("this product's FineTuneProfile", "transformers AutoConfig.from_pretrained(trust_remote_code=True)"),
    reproduction=Reproduction(
        "tests/pitfalls/test_sources.py::test_a_models_own_code_runs",
        "no error: the model's code runs as its configuration is read",
    ),
    holds_for=OURS,
)
def remote_code_not_allowed(context: RuleContext) -> Problem | None:
    if not context.spec.model.allow_remote_code or context.profile is None or context.profile.allow_remote_code:
        return None
    return Problem(
        field=_ALLOW,
        value=True,
        message="code in the model directory would run with the rights of the pod, and the profile does not allow that",
        fix=f"remove {_ALLOW} and use an architecture that transformers knows, or ask for a profile that allows it",
        changes={_ALLOW: None},
    )


def _no_source_is(kind: type[HubPath] | type[BucketPath]) -> Callable[[RuleContext], bool]:
    return lambda context: not any(isinstance(parse_source(named.source), kind) for named in named_sources(context.spec))


NO_EFFECT = (
    NoEffect(
        "no-effect-hub-token",
        "A Hub token is for hf:// sources",
        ("fetch.hubTokenSecretRef",),
        SOURCES,
        _no_source_is(HubPath),
        "no source begins with hf://",
        SAME_PLAN,
    ),
    NoEffect(
        "no-effect-s3-secret",
        "S3 keys are for s3:// sources",
        ("fetch.s3SecretRef",),
        SOURCES,
        _no_source_is(BucketPath),
        "no source begins with s3://",
        SAME_PLAN,
    ),
)
RULES = (
    hub_source_without_revision,
    revision_without_hub_source,
    hub_name_with_hub_source,
    model_source_is_dataset,
    model_source_inside_repository,
    data_source_is_model,
    source_not_allowed,
    *no_effect_rules(__name__, NO_EFFECT),
    remote_code_not_allowed,
)

"""Rules on sources of models and data: addresses, commits, remote code, and credentials."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from finetune_job.api.base import HUB_DATASETS, BucketPath, ClaimPath, HubPath, parse_source
from finetune_job.api.profile import is_allowed
from finetune_job.plan.inputs import NamedSource, named_sources, training_sets
from finetune_job.rules.rule import Problem, RuleContext, rule

_DATASETS = "data.datasets"
NO_COMMIT = "0" * 40
"""Example commit for use in a fix, since only the user knows the real one. No repository has it, so a fetch fails clearly."""
WITHOUT_COMMIT = "hub-source-without-revision"
_NUMBER = re.compile(r"data\.datasets\[(\d+)\]")


@dataclass(frozen=True)
class _SourceEdit:
    """A source, and the address and revision that the manifest should have instead."""

    named: NamedSource
    source: str
    revision: str | None


def _field(path: str) -> str:
    """Return the field that a finding names for this path: for an item of a list, the whole list."""
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
    """Return a problem that names the first wrong source; its changes correct all wrong sources."""
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
    """Return a command that prints the newest commit of a repository on the Hub."""
    kind = HUB_DATASETS if place.is_dataset else ""
    return f"git ls-remote https://huggingface.co/{kind}{place.repository} HEAD"


@rule(WITHOUT_COMMIT)
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
        "without a commit, a restarted job could read different files from those it started with",
        f"set it to the 40 digits that `{commit_command(places[0])}` prints" if places else "",
        of_revision=True,
    )


@rule("revision-without-hub-source")
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


@rule("hub-name-with-hub-source")
def hub_name_with_hub_source(context: RuleContext) -> Problem | None:
    name, place = context.spec.model.hub_name, parse_source(context.spec.model.source)
    if name is None or not isinstance(place, HubPath):
        return None
    return Problem(
        value=name,
        message=f"the source is already the Hub repository {place.repository}, and the adapter records that as its base model",
        fix="remove hubName; it is for copies of a model on a claim or in a bucket",
    )


@rule("model-source-is-dataset")
def model_source_is_dataset(context: RuleContext) -> Problem | None:
    return _problem(
        context,
        [edit for edit in _model_edits(context) if edit.named.source.removeprefix("hf://").startswith(HUB_DATASETS)],
        f"hf://{HUB_DATASETS} names a data set, but this field takes a base model",
        "write hf://<organisation>/<model>",
    )


@rule("model-source-inside-repository")
def model_source_inside_repository(context: RuleContext) -> Problem | None:
    return _problem(
        context,
        [edit for edit in _model_edits(context) if _path_of(edit.named) != ""],
        "it names a directory inside a repository, but the adapter would name the repository, another model, as its base",
        "write hf://<organisation>/<model>; copy a model in a directory to a claim or a bucket",
    )


def _model_edits(context: RuleContext) -> list[_SourceEdit]:
    """Return the edit that turns the model's source into a whole repository; none if the source is not on the Hub."""
    return [
        _SourceEdit(named, f"hf://{place.repository}", named.revision)
        for named in named_sources(context.spec)
        if named.is_model and isinstance(place := parse_source(named.source), HubPath)
    ]


def _path_of(named: NamedSource) -> str:
    place = parse_source(named.source)
    return place.path if isinstance(place, HubPath) else ""


@rule("data-source-is-model")
def data_source_is_model(context: RuleContext) -> Problem | None:
    """Refuse a whole model repository as data. A single file or directory in such a repository may well contain records."""
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
    """Chooses locations on claims for copies of sources. Two sources never share one, or training could see held-out records."""

    def __init__(self, context: RuleContext) -> None:
        self._copied = {named.source.rstrip("/"): named.source.rstrip("/") for named in named_sources(context.spec)}

    def of(self, named: NamedSource) -> str:
        source = named.source.rstrip("/")
        # An object key may contain characters that are not allowed in a path on a claim.
        name = re.sub(r"[^A-Za-z0-9._-]", "-", source.rpartition("/")[2])
        stem, dot, suffix = name.rpartition(".")
        beginning, end = (stem, dot + suffix) if stem else (name, "")
        names = chain([name], (f"{beginning}-{number}{end}" for number in count(1)))
        places = (f"pvc://{'models' if named.is_model else 'data'}/{each}" for each in names)
        return next(place for place in places if self._copied.setdefault(place, source) == source)


@rule("source-not-allowed")
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
        context, edits, f"fetch.allowedSources of the profile: {listed}", "copy it to a claim, or use a profile that allows it"
    )


@rule("remote-code-not-allowed")
def remote_code_not_allowed(context: RuleContext) -> Problem | None:
    if not context.spec.model.allow_remote_code or context.profile is None or context.profile.allow_remote_code:
        return None
    return Problem(value=True)


def _no_source_is(kind: type[HubPath] | type[BucketPath]) -> Callable[[RuleContext], bool]:
    return lambda context: not any(isinstance(parse_source(named.source), kind) for named in named_sources(context.spec))


rule("no-effect-hub-token")(_no_source_is(HubPath))
rule("no-effect-s3-secret")(_no_source_is(BucketPath))

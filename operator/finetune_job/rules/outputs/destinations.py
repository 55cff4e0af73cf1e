"""Destinations: which a profile lets through, what a destination must not overwrite, and names that are free for it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from typing import Literal

from finetune_job.api.base import (
    BucketPath,
    ClaimPath,
    HubPath,
    RegistryPath,
    adapter_repository,
    parse_destination,
    parse_source,
)
from finetune_job.api.method import MethodType
from finetune_job.api.profile import is_allowed
from finetune_job.plan.inputs import NamedSource, named_sources
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.sources import SOURCES

_NAME = "finetune-output"
"""Of a directory in a fix, if only the user can know the name."""
_CLAIM = "results"
"""The same of a claim."""
_DESTINATION = "output.destination"
_ADAPTER = "output.adapter"


def same_service(context: RuleContext, endpoint: Literal["hub_endpoint", "s3_endpoint"]) -> bool:
    """Whether what is read and what is written are in one service, where one name means one place."""
    profile = context.profile
    return profile is None or getattr(profile.fetch, endpoint) == getattr(profile.publish, endpoint)


def destination_of(context: RuleContext) -> ClaimPath | HubPath | BucketPath | RegistryPath:
    return parse_destination(context.spec.output.destination)


def adapter_destination(context: RuleContext) -> HubPath | None:
    """The repository of the adapter if the merged model takes the destination itself; None: it has none of its own."""
    spec, place = context.spec, destination_of(context)
    is_apart = spec.merge.enabled and spec.output.adapter and spec.method.type is not MethodType.FULL
    return adapter_repository(place) if is_apart and isinstance(place, HubPath) else None


def _first_free(name: str, is_taken: Callable[[str], bool]) -> str:
    """`name`, or the first of `name-1`, `name-2` and so on that is free."""
    names = chain([name], (f"{name}-{number}" for number in count(1)))
    return next(each for each in names if not is_taken(each))


def is_within(inner: ClaimPath, outer: ClaimPath) -> bool:
    """Whether `inner` is `outer` or is inside it."""
    if inner.claim != outer.claim:
        return False
    return outer.path in ("", inner.path) or inner.path.startswith(outer.path + "/")


def overwrites_input(target: ClaimPath, named: NamedSource) -> bool:
    """Whether results would change an input: of a model at the top of its directory, of records anywhere below."""
    place = parse_source(named.source)
    if not isinstance(place, ClaimPath):
        return False
    return target == place if named.is_model else is_within(target, place)


def free_directory(context: RuleContext, claim: str = _CLAIM) -> str:
    """A directory that is not part of an input, on this claim, or on another if all of this one is records."""
    inputs = named_sources(context.spec)

    def is_taken(claim: str, name: str) -> bool:
        return any(overwrites_input(ClaimPath(claim=claim, path=name), each) for each in inputs)

    def is_all_records(claim: str) -> bool:
        # Of a claim's root alone: no directory that a manifest names has this name.
        return is_taken(claim, "*")

    claim = claim if not is_all_records(claim) else _first_free(_CLAIM, is_all_records)
    return f"pvc://{claim}/{_first_free(_NAME, lambda name: is_taken(claim, name))}"


def free_prefix(bucket: str, inputs: list[BucketPath]) -> str:
    """A prefix that overlaps with no input; in another bucket if an input is the whole one."""
    if any(place.bucket == bucket and place.prefix == "" for place in inputs):
        bucket = _first_free(f"{bucket[:40]}-tuned", lambda name: any(place.bucket == name for place in inputs))
    prefixes = [place.prefix for place in inputs if place.bucket == bucket]
    return f"s3://{bucket}/{_first_free(_NAME, lambda name: any(prefixes_overlap(name, each) for each in prefixes))}"


def is_below(inner: str, outer: str) -> bool:
    """Whether a prefix is another or is inside it; segments count, not characters."""
    first, second = [part for part in inner.split("/") if part], [part for part in outer.split("/") if part]
    return first[: len(second)] == second


def prefixes_overlap(one: str, other: str) -> bool:
    """Whether one prefix is inside the other."""
    return is_below(one, other) or is_below(other, one)


@rule(
    "output-inside-input",
    "Results must not be written over what they are made from",
    reads=(_DESTINATION, *SOURCES),
    sources=("this product: a model is the files at the top of its directory, records are all files below theirs",),
    reproduction=Reproduction(
        "tests/pitfalls/test_destinations.py::test_results_replace_the_models_own_files "
        "tests/pitfalls/test_destinations.py::test_the_next_run_would_read_results_as_records",
        "no error: the model's own card and checksums are replaced, and the next run reads the results' files as records",
    ),
    holds_for=OURS,
)
def output_inside_input(context: RuleContext) -> Problem | None:
    target = destination_of(context)
    if not isinstance(target, ClaimPath):
        return None
    for named in named_sources(context.spec):
        if not overwrites_input(target, named):
            continue
        done = "replace files of that model" if named.is_model else "be read as records by the next run"
        written = free_directory(context, target.claim)
        return Problem(
            field=_DESTINATION,
            value=context.spec.output.destination,
            message=f"it {'is' if named.is_model else 'is in'} {named.field} ({named.source}): the results would {done}",
            fix=f"write to a directory of its own, such as {written}",
            changes={_DESTINATION: written},
        )
    return None


@rule(
    "output-overlaps-bucket-input",
    "A prefix holds inputs or results, not both",
    reads=(_DESTINATION, *SOURCES),
    sources=("this product: records in a bucket are all objects below their prefix, and results are added to no others",),
    reproduction=Reproduction(
        "tests/pitfalls/test_destinations.py::test_a_prefix_that_holds_inputs_takes_no_results "
        "tests/pitfalls/test_destinations.py::test_the_next_run_would_fetch_results_as_records",
        "DestinationRefusedError after the training: the prefix 'holds what does not belong to this release'; below a prefix of "
        "records no error: the next run fetches the results' files as records",
    ),
    holds_for=OURS,
)
def output_overlaps_bucket_input(context: RuleContext) -> Problem | None:
    target = destination_of(context)
    if not isinstance(target, BucketPath) or not same_service(context, "s3_endpoint"):
        return None
    places = [(named, parse_source(named.source)) for named in named_sources(context.spec)]
    inputs = [place for _, place in places if isinstance(place, BucketPath)]
    for named, place in places:
        if not isinstance(place, BucketPath) or place.bucket != target.bucket:
            continue
        if is_below(place.prefix, target.prefix):
            why = "publishing would refuse to add to it, and this would show only after the training"
        elif is_below(target.prefix, place.prefix) and not named.is_model:
            why = "the next run would read the results as records"
        else:
            continue
        written = free_prefix(target.bucket, inputs)
        return Problem(
            field=_DESTINATION,
            value=context.spec.output.destination,
            message=f"it overlaps with {named.field} ({named.source}): {why}",
            fix=f"write to a prefix that no input has, such as {written}",
            changes={_DESTINATION: written},
        )
    return None


@rule(
    "output-replaces-model",
    "Results do not replace the model that they are made from",
    reads=(_DESTINATION, "model.source"),
    sources=("this product: publishing commits the result to the top of the repository, and replaces results of its own alone",),
    reproduction=Reproduction(
        "tests/pitfalls/test_destinations.py::test_a_model_is_not_replaced_by_what_is_made_from_it",
        "DestinationRefusedError after the training: 'no run of this operator put there'; a result of this operator is replaced",
    ),
    holds_for=OURS,
)
def output_replaces_model(context: RuleContext) -> Problem | None:
    target, model = destination_of(context), parse_source(context.spec.model.source)
    if not isinstance(target, HubPath) or not isinstance(model, HubPath) or model.is_dataset:
        return None
    # The Hub does not tell capitals from small letters.
    written_to = {place.repository.casefold() for place in (target, adapter_destination(context)) if place is not None}
    if model.repository.casefold() not in written_to or not same_service(context, "hub_endpoint"):
        return None
    written = f"hf://{target.repository}-tuned"
    return Problem(
        field=_DESTINATION,
        value=context.spec.output.destination,
        message=f"model.source ({context.spec.model.source}) is a repository of the results: publishing would refuse to replace "
        "it, after the training, or replace it if it is a result of this operator itself",
        fix=f"name a repository of its own, such as {written}",
        changes={_DESTINATION: written},
    )


@rule(
    "destination-not-allowed",
    "The profile lets results out to some destinations only",
    reads=(_DESTINATION, _ADAPTER),
    sources=("this product's FineTuneProfile",),
    holds_for=OURS,
    not_reproduced="no library fails: what the profile allows is up to administrators",
)
def destination_not_allowed(context: RuleContext) -> Problem | None:
    if context.profile is None:
        return None
    allowed, destination = context.profile.publish.allowed_destinations or [], context.spec.output.destination
    listed = ", ".join(allowed) or "no destination outside the cluster"
    adapter = adapter_destination(context)
    if isinstance(destination_of(context), ClaimPath):
        return None
    if is_allowed(destination, allowed):
        if adapter is None or is_allowed(f"hf://{adapter.repository}", allowed):
            return None
        return Problem(
            field=_ADAPTER,
            value=True,
            message=f"the adapter would go to hf://{adapter.repository}; publish.allowedDestinations of the profile: {listed}",
            fix="publish the merged model alone, or ask for a profile that allows both repositories",
            changes={_ADAPTER: False},
        )
    return Problem(
        field=_DESTINATION,
        value=destination,
        message=f"publish.allowedDestinations of the profile: {listed}",
        fix="write to a claim, or ask for a profile that allows it",
        changes={_DESTINATION: free_directory(context)},
    )


RULES = (
    output_inside_input,
    output_overlaps_bucket_input,
    output_replaces_model,
    destination_not_allowed,
)

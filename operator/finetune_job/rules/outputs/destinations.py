"""Rules on destinations: the profile must allow them, and they must not overwrite inputs. Also finds free names for fixes."""

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
from finetune_job.rules.rule import Problem, RuleContext, rule

_NAME = "finetune-output"
"""Example directory for use in a fix, since only the user knows the real name."""
_CLAIM = "results"
"""Example claim for use in a fix, since only the user knows the real name."""
_DESTINATION = "output.destination"
_ADAPTER = "output.adapter"


def same_service(context: RuleContext, endpoint: Literal["hub_endpoint", "s3_endpoint"]) -> bool:
    """Whether sources and destinations use the same service, so that equal names mean the same place."""
    profile = context.profile
    return profile is None or getattr(profile.fetch, endpoint) == getattr(profile.publish, endpoint)


def destination_of(context: RuleContext) -> ClaimPath | HubPath | BucketPath | RegistryPath:
    return parse_destination(context.spec.output.destination)


def adapter_destination(context: RuleContext) -> HubPath | None:
    """Return the adapter's own repository on the Hub; None unless a merged model and an adapter are both published there."""
    spec, place = context.spec, destination_of(context)
    is_apart = spec.merge.enabled and spec.output.adapter and spec.method.type is not MethodType.FULL
    return adapter_repository(place) if is_apart and isinstance(place, HubPath) else None


def _first_free(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return `name`, or the first of `name-1`, `name-2` and so on that is free."""
    names = chain([name], (f"{name}-{number}" for number in count(1)))
    return next(candidate for candidate in names if not is_taken(candidate))


def is_within(inner: ClaimPath, outer: ClaimPath) -> bool:
    """Whether `inner` is `outer` or is inside it."""
    if inner.claim != outer.claim:
        return False
    return outer.path in ("", inner.path) or inner.path.startswith(outer.path + "/")


def overwrites_input(target: ClaimPath, named: NamedSource) -> bool:
    """Whether results would alter an input: a model by files in its own directory, records also by files in subdirectories."""
    place = parse_source(named.source)
    if not isinstance(place, ClaimPath):
        return False
    return target == place if named.is_model else is_within(target, place)


def free_directory(context: RuleContext, claim: str = _CLAIM) -> str:
    """Return a directory that is not part of an input: on this claim, or on another if records take up the whole claim."""
    inputs = named_sources(context.spec)

    def is_taken(claim: str, name: str) -> bool:
        return any(overwrites_input(ClaimPath(claim=claim, path=name), read) for read in inputs)

    def is_all_records(claim: str) -> bool:
        # No directory in a manifest can be called "*", so this is true only if the claim's root holds records.
        return is_taken(claim, "*")

    claim = claim if not is_all_records(claim) else _first_free(_CLAIM, is_all_records)
    return f"pvc://{claim}/{_first_free(_NAME, lambda name: is_taken(claim, name))}"


def free_prefix(bucket: str, inputs: list[BucketPath]) -> str:
    """Return a prefix that does not overlap with any input; in another bucket if an input is the whole bucket."""
    if any(place.bucket == bucket and place.prefix == "" for place in inputs):
        bucket = _first_free(f"{bucket[:40]}-tuned", lambda name: any(place.bucket == name for place in inputs))
    prefixes = [place.prefix for place in inputs if place.bucket == bucket]
    return f"s3://{bucket}/{_first_free(_NAME, lambda name: any(prefixes_overlap(name, each) for each in prefixes))}"


def is_below(inner: str, outer: str) -> bool:
    """Whether the prefix `inner` equals `outer` or is inside it, comparing whole segments rather than characters."""
    first, second = [part for part in inner.split("/") if part], [part for part in outer.split("/") if part]
    return first[: len(second)] == second


def prefixes_overlap(prefix: str, other: str) -> bool:
    """Whether the prefixes are equal or one is inside the other."""
    return is_below(prefix, other) or is_below(other, prefix)


@rule("output-inside-input")
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
            value=context.spec.output.destination,
            message=f"it {'is' if named.is_model else 'is in'} {named.field} ({named.source}): the results would {done}",
            fix=f"write to a directory of its own, such as {written}",
            changes={_DESTINATION: written},
        )
    return None


@rule("output-overlaps-bucket-input")
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
            value=context.spec.output.destination,
            message=f"it overlaps with {named.field} ({named.source}): {why}",
            fix=f"write to a prefix that no input has, such as {written}",
            changes={_DESTINATION: written},
        )
    return None


@rule("output-replaces-model")
def output_replaces_model(context: RuleContext) -> Problem | None:
    target, model = destination_of(context), parse_source(context.spec.model.source)
    if not isinstance(target, HubPath) or not isinstance(model, HubPath) or model.is_dataset:
        return None
    # The Hub's names are case-insensitive, so this comparison is too.
    written_to = {place.repository.casefold() for place in (target, adapter_destination(context)) if place is not None}
    if model.repository.casefold() not in written_to or not same_service(context, "hub_endpoint"):
        return None
    written = f"hf://{target.repository}-tuned"
    return Problem(
        value=context.spec.output.destination,
        message=f"model.source ({context.spec.model.source}) is a repository of the results: publishing would refuse to replace "
        "it, after the training, or replace it if it is a result of this operator itself",
        fix=f"name a repository of its own, such as {written}",
        changes={_DESTINATION: written},
    )


@rule("destination-not-allowed")
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
            value=True,
            message=f"the adapter would go to hf://{adapter.repository}; publish.allowedDestinations of the profile: {listed}",
            fix="publish the merged model alone, or use a profile that allows both repositories",
            field=_ADAPTER,
            changes={_ADAPTER: False},
        )
    return Problem(
        value=destination,
        message=f"publish.allowedDestinations of the profile: {listed}",
        fix="write to a claim, or use a profile that allows it",
        changes={_DESTINATION: free_directory(context)},
    )

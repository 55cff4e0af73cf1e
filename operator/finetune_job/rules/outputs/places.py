"""Places that results go to, and names that are free for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from typing import Literal

from finetune_job.api.base import BucketPath, ClaimPath, HubPath, RegistryPath, parse_destination, parse_source
from finetune_job.plan.sources import NamedSource, named_sources
from finetune_job.rules.context import RuleContext

_NAME = "finetune-output"
"""Of a directory that stands in a fix where only the user can know the name."""
_CLAIM = "results"
"""The same of a claim."""


def same_service(context: RuleContext, endpoint: Literal["hub_endpoint", "s3_endpoint"]) -> bool:
    """Whether what is read and what is written lie in one service, where one name means one place."""
    profile = context.profile
    return profile is None or getattr(profile.fetch, endpoint) == getattr(profile.publish, endpoint)


def place_of(context: RuleContext) -> ClaimPath | HubPath | BucketPath | RegistryPath:
    return parse_destination(context.spec.output.destination)


def _free(name: str, is_taken: Callable[[str], bool]) -> str:
    """`name`, or the first of `name-1`, `name-2` and so on that is free."""
    names = chain([name], (f"{name}-{number}" for number in count(1)))
    return next(each for each in names if not is_taken(each))


def is_within(inner: ClaimPath, outer: ClaimPath) -> bool:
    """Whether `inner` is `outer` or lies in it."""
    if inner.claim != outer.claim:
        return False
    return outer.path in ("", inner.path) or inner.path.startswith(outer.path + "/")


def writes_into(target: ClaimPath, named: NamedSource) -> bool:
    """Whether results would change an input: of a model what lies at the top of its directory, of records all that lies below."""
    place = parse_source(named.source)
    if not isinstance(place, ClaimPath):
        return False
    return target == place if named.is_model else is_within(target, place)


def free_directory(context: RuleContext, claim: str = _CLAIM) -> str:
    """A directory that is no part of an input, on this claim, or on another where all of this one is records."""
    inputs = named_sources(context.spec)

    def is_taken(claim: str, name: str) -> bool:
        return any(writes_into(ClaimPath(claim=claim, path=name), each) for each in inputs)

    def is_all_records(claim: str) -> bool:
        # Of a claim's root alone: no directory that a manifest names has this name.
        return is_taken(claim, "*")

    claim = claim if not is_all_records(claim) else _free(_CLAIM, is_all_records)
    return f"pvc://{claim}/{_free(_NAME, lambda name: is_taken(claim, name))}"


def free_prefix(bucket: str, inputs: list[BucketPath]) -> str:
    """A prefix that overlaps with no input; in another bucket where an input is the whole one."""
    if any(place.bucket == bucket and place.prefix == "" for place in inputs):
        bucket = _free(f"{bucket[:40]}-tuned", lambda name: any(place.bucket == name for place in inputs))
    beside = [place.prefix for place in inputs if place.bucket == bucket]
    return f"s3://{bucket}/{_free(_NAME, lambda name: any(overlap(name, each) for each in beside))}"


def lies_below(inner: str, outer: str) -> bool:
    """Whether a prefix is another or lies in it; segments count, not characters."""
    first, second = [part for part in inner.split("/") if part], [part for part in outer.split("/") if part]
    return first[: len(second)] == second


def overlap(one: str, other: str) -> bool:
    """Whether one prefix lies in the other."""
    return lies_below(one, other) or lies_below(other, one)

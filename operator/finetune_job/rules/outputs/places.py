"""Places that results go to, and names that are free for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from finetune_job.api.base import BucketPath, ClaimPath, HubPath, RegistryPath, parse_destination, parse_source
from finetune_job.plan.sources import named_sources
from finetune_job.rules.context import RuleContext

_NAME = "finetune-output"
"""Of a directory or repository that stands in a fix where only the user can know the name."""


def same_service(context: RuleContext, endpoint: Literal["hub_endpoint", "s3_endpoint"]) -> bool:
    """Whether what is read and what is written lie in one service, where one name means one place."""
    profile = context.profile
    return profile is None or getattr(profile.fetch, endpoint) == getattr(profile.publish, endpoint)


def place_of(context: RuleContext) -> ClaimPath | HubPath | BucketPath | RegistryPath:
    return parse_destination(context.spec.output.destination)


def _free(name: str, is_taken: Callable[[str], bool]) -> str:
    """`name`, or with `-1` behind it as often as it takes."""
    while is_taken(name):
        name += "-1"
    return name


def is_within(inner: ClaimPath, outer: ClaimPath) -> bool:
    """Whether `inner` is `outer` or lies in it; the root of a claim holds everything and counts only for itself."""
    if inner.claim != outer.claim:
        return False
    return inner.path == outer.path or (outer.path != "" and inner.path.startswith(outer.path + "/"))


def free_directory(context: RuleContext, claim: str) -> str:
    """A directory of a claim that no input lies around."""
    places = [parse_source(named.source) for named in named_sources(context.spec)]
    taken = [place for place in places if isinstance(place, ClaimPath)]
    name = _free(_NAME, lambda name: any(is_within(ClaimPath(claim=claim, path=name), each) for each in taken))
    return f"pvc://{claim}/{name}"


def free_prefix(bucket: str, inputs: list[BucketPath]) -> str:
    """A prefix that overlaps with no input; in another bucket where an input is the whole one."""
    if any(place.bucket == bucket and place.prefix == "" for place in inputs):
        bucket = _free(f"{bucket[:40]}-tuned", lambda name: any(place.bucket == name for place in inputs))
    beside = [place.prefix for place in inputs if place.bucket == bucket]
    return f"s3://{bucket}/{_free(_NAME, lambda name: any(overlap(name, each) for each in beside))}"


def overlap(one: str, other: str) -> bool:
    """Whether one prefix lies in the other; segments count, not characters."""
    first, second = [part for part in one.split("/") if part], [part for part in other.split("/") if part]
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]

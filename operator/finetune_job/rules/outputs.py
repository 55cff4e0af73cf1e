"""Where results go: which destinations a profile lets through, and what a destination must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from finetune_job.api.base import BucketPath, ClaimPath, HubPath, RegistryPath, parse_destination, parse_source
from finetune_job.api.method import MethodType
from finetune_job.plan.sources import named_sources
from finetune_job.rules.allowed import is_allowed
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule

_DESTINATION = "output.destination"
_ADAPTER = "output.adapter"
_SECRET = "output.secretRef"  # noqa: S105 - a field that names a Secret
_PRIVATE = "output.private"
_INPUTS = ("model.source", "data.source", "data.datasets", "data.validation.source")
_NAME = "finetune-output"
"""Of a directory or repository that stands in a fix where only the user can know the name."""


def _same_service(context: RuleContext, endpoint: Literal["hub_endpoint", "s3_endpoint"]) -> bool:
    """Whether what is read and what is written lie in one service, where one name means one place."""
    profile = context.profile
    return profile is None or getattr(profile.fetch, endpoint) == getattr(profile.publish, endpoint)


def _place(context: RuleContext) -> ClaimPath | HubPath | BucketPath | RegistryPath:
    return parse_destination(context.spec.output.destination)


def _free(name: str, is_taken: Callable[[str], bool]) -> str:
    """`name`, or with `-1` behind it as often as it takes."""
    while is_taken(name):
        name += "-1"
    return name


@rule(
    "output-inside-input",
    "Results must not be written over what they are made from",
    reads=(_DESTINATION, *_INPUTS),
    sources=("this product: results are moved into place as whole directories",),
    holds_for=OURS,
)
def output_inside_input(context: RuleContext) -> Problem | None:
    target = _place(context)
    if not isinstance(target, ClaimPath):
        return None
    for named in named_sources(context.spec):
        place = parse_source(named.source)
        if isinstance(place, ClaimPath) and _within(target, place):
            return Problem(
                field=_DESTINATION,
                value=context.spec.output.destination,
                message=f"it lies in {named.field} ({named.source}): the results would change the input that they are made from",
                fix=f"write to a directory beside the input, such as pvc://{target.claim}/{_NAME}",
                changes={_DESTINATION: _free_directory(context, target.claim)},
            )
    return None


def _within(inner: ClaimPath, outer: ClaimPath) -> bool:
    """Whether `inner` is `outer` or lies in it; the root of a claim holds everything and counts only for itself."""
    if inner.claim != outer.claim:
        return False
    return inner.path == outer.path or (outer.path != "" and inner.path.startswith(outer.path + "/"))


def _free_directory(context: RuleContext, claim: str) -> str:
    """A directory of a claim that no input lies around."""
    places = [parse_source(named.source) for named in named_sources(context.spec)]
    taken = [place for place in places if isinstance(place, ClaimPath)]
    name = _free(_NAME, lambda name: any(_within(ClaimPath(claim=claim, path=name), each) for each in taken))
    return f"pvc://{claim}/{name}"


@rule(
    "output-overlaps-bucket-input",
    "A prefix holds inputs or results, not both",
    reads=(_DESTINATION, *_INPUTS),
    sources=("this product: a source in a bucket is every object below its prefix",),
    holds_for=OURS,
)
def output_overlaps_bucket_input(context: RuleContext) -> Problem | None:
    target = _place(context)
    if not isinstance(target, BucketPath) or not _same_service(context, "s3_endpoint"):
        return None
    places = [(named, parse_source(named.source)) for named in named_sources(context.spec)]
    inputs = [place for _, place in places if isinstance(place, BucketPath)]
    for named, place in places:
        if not isinstance(place, BucketPath) or place.bucket != target.bucket or not _overlap(target.prefix, place.prefix):
            continue
        written = _free_prefix(target.bucket, inputs)
        return Problem(
            field=_DESTINATION,
            value=context.spec.output.destination,
            message=f"it and {named.field} ({named.source}) lie one in the other: the next run would read the results as its input",
            fix=f"write to a prefix that no input has, such as {written}",
            changes={_DESTINATION: written},
        )
    return None


def _free_prefix(bucket: str, inputs: list[BucketPath]) -> str:
    """A prefix that overlaps with no input; in another bucket where an input is the whole one."""
    if any(place.bucket == bucket and place.prefix == "" for place in inputs):
        bucket = _free(f"{bucket[:40]}-tuned", lambda name: any(place.bucket == name for place in inputs))
    beside = [place.prefix for place in inputs if place.bucket == bucket]
    return f"s3://{bucket}/{_free(_NAME, lambda name: any(_overlap(name, each) for each in beside))}"


def _overlap(one: str, other: str) -> bool:
    """Whether one prefix lies in the other; segments count, not characters."""
    first, second = [part for part in one.split("/") if part], [part for part in other.split("/") if part]
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


@rule(
    "output-replaces-model",
    "Results do not replace the model that they are made from",
    reads=(_DESTINATION, "model.source"),
    sources=("this product: publishing commits the merged model to the top of the repository",),
    holds_for=OURS,
)
def output_replaces_model(context: RuleContext) -> Problem | None:
    target, model = _place(context), parse_source(context.spec.model.source)
    if not isinstance(target, HubPath) or not isinstance(model, HubPath) or model.is_dataset:
        return None
    # The Hub does not tell capitals from small letters.
    if target.repository.casefold() != model.repository.casefold() or not _same_service(context, "hub_endpoint"):
        return None
    written = f"hf://{target.repository}-tuned"
    return Problem(
        field=_DESTINATION,
        value=context.spec.output.destination,
        message=f"it is the repository of model.source ({context.spec.model.source}), whose files the results would replace",
        fix=f"name a repository of its own, such as {written}",
        changes={_DESTINATION: written},
    )


@rule(
    "destination-not-allowed",
    "The profile lets results out to some destinations only",
    reads=(_DESTINATION,),
    sources=("this product's FineTuneProfile",),
    holds_for=OURS,
)
def destination_not_allowed(context: RuleContext) -> Problem | None:
    allowed = None if context.profile is None else context.profile.publish.allowed_destinations
    destination = context.spec.output.destination
    if allowed is None or isinstance(_place(context), ClaimPath) or is_allowed(destination, allowed):
        return None
    listed = ", ".join(allowed) or "no destination outside the cluster"
    return Problem(
        field=_DESTINATION,
        value=destination,
        message=f"the profile allows {listed}",
        fix="write to a claim, or ask for a profile that allows it",
        changes={_DESTINATION: _free_directory(context, "results")},
    )


@rule(
    "hub-destination-without-token",
    "Nobody writes to the Hub without a token",
    reads=(_DESTINATION, _SECRET),
    sources=("Hugging Face Hub: commits need a token with the right to write",),
    holds_for=OURS,
)
def hub_destination_without_token(context: RuleContext) -> Problem | None:
    """On a cluster only: on a person's machine the library finds the token that its own login has left."""
    output, profile = context.spec.output, context.profile
    if profile is None or profile.publish.hub_endpoint is not None:
        return None
    if not isinstance(_place(context), HubPath) or output.secret_ref is not None:
        return None
    return Problem(
        field=_SECRET,
        value=None,
        message=f"{output.destination} takes nothing without a token, and this would show only after the training",
        fix=f'make a Secret with a write token under "token" and name it in {_SECRET}.name',
        changes={_SECRET: {"name": "hub-write-token"}},
    )


@rule(
    "output-adapter-is-the-result",
    "Without a merged model the adapter is the result",
    reads=(_ADAPTER, "merge.enabled"),
    sources=("this product's API",),
    holds_for=OURS,
)
def output_adapter_is_the_result(context: RuleContext) -> Problem | None:
    spec = context.spec
    if spec.output.adapter or spec.merge.enabled or spec.method.type is MethodType.FULL:
        return None
    return Problem(
        field=_ADAPTER,
        value=spec.output.adapter,
        message="nothing is merged, so without the adapter there would be no result",
        fix=f"remove {_ADAPTER}, or set merge.enabled to true",
        changes={_ADAPTER: None},
    )


@rule(
    "no-effect-output-adapter",
    "Full fine-tuning has no adapter",
    severity="warning",
    reads=(_ADAPTER, "method.type"),
    sources=("this product's API",),
    holds_for=OURS,
)
def no_effect_output_adapter(context: RuleContext) -> Problem | None:
    spec = context.spec
    if spec.output.adapter or spec.method.type is not MethodType.FULL:
        return None
    return Problem(
        field=_ADAPTER,
        value=spec.output.adapter,
        message="NoEffect: full fine-tuning changes the weights themselves and makes no adapter",
        fix=f"remove {_ADAPTER}",
        changes={_ADAPTER: None},
    )


@rule(
    "no-effect-output-secret",
    "A claim needs no Secret",
    severity="warning",
    reads=(_SECRET, _DESTINATION),
    sources=("this product's API",),
    holds_for=OURS,
)
def no_effect_output_secret(context: RuleContext) -> Problem | None:
    secret = context.spec.output.secret_ref
    if secret is None or not isinstance(_place(context), ClaimPath):
        return None
    return Problem(
        field=_SECRET,
        value=secret.name,
        message="NoEffect: results on a claim are written by a pod that mounts it, and no credentials are asked for",
        fix=f"remove {_SECRET}",
        changes={_SECRET: None},
    )


@rule(
    "no-effect-output-private",
    "Only a repository on the Hub is private or public",
    severity="warning",
    reads=(_PRIVATE, _DESTINATION),
    sources=("this product's API",),
    holds_for=OURS,
)
def no_effect_output_private(context: RuleContext) -> Problem | None:
    """Of `false` alone: the API server writes the default into every object."""
    if context.spec.output.private or isinstance(_place(context), HubPath):
        return None
    return Problem(
        field=_PRIVATE,
        value=context.spec.output.private,
        message="NoEffect: who may read a claim, a bucket or a registry is decided there",
        fix=f"remove {_PRIVATE}",
        changes={_PRIVATE: None},
    )


@rule(
    "credentials-without-tls",
    "Credentials travel in clear without TLS",
    severity="warning",
    reads=(_SECRET, _DESTINATION),
    sources=("RFC 7617: basic authentication is as secret as the connection it is sent over",),
    holds_for=OURS,
)
def credentials_without_tls(context: RuleContext) -> Problem | None:
    secret, profile = context.spec.output.secret_ref, context.profile
    if secret is None or profile is None:
        return None
    match place := _place(context):
        case HubPath():
            in_clear = (profile.publish.hub_endpoint or "").startswith("http://")
        case RegistryPath():
            in_clear = place.registry in profile.publish.plain_http_registries
        case _:
            # A request to a bucket is signed, and its secret key stays here.
            in_clear = False
    if not in_clear:
        return None
    return Problem(
        field=_SECRET,
        value=secret.name,
        message="the profile has this destination spoken to over plain HTTP, where everybody on the way can read the credentials",
        fix="write to a claim, or ask for a profile with an address that speaks TLS",
        changes={_DESTINATION: _free_directory(context, "results"), _SECRET: None},
    )


RULES = (
    output_inside_input,
    output_overlaps_bucket_input,
    output_replaces_model,
    destination_not_allowed,
    hub_destination_without_token,
    output_adapter_is_the_result,
    no_effect_output_adapter,
    no_effect_output_secret,
    no_effect_output_private,
    credentials_without_tls,
)

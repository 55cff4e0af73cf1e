"""Which destinations a profile lets through, and what a destination must not be."""

from __future__ import annotations

from finetune_job.api.base import BucketPath, ClaimPath, HubPath, parse_source
from finetune_job.plan.sources import named_sources
from finetune_job.rules.allowed import is_allowed
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule
from finetune_job.rules.outputs.places import free_directory, free_prefix, is_within, overlap, place_of, same_service

_DESTINATION = "output.destination"
_INPUTS = ("model.source", "data.source", "data.datasets", "data.validation.source")
_NAME = "finetune-output"
"""Of a directory or repository that stands in a fix where only the user can know the name."""


@rule(
    "output-inside-input",
    "Results must not be written over what they are made from",
    reads=(_DESTINATION, *_INPUTS),
    sources=("this product: results are moved into place as whole directories",),
    holds_for=OURS,
)
def output_inside_input(context: RuleContext) -> Problem | None:
    target = place_of(context)
    if not isinstance(target, ClaimPath):
        return None
    for named in named_sources(context.spec):
        place = parse_source(named.source)
        if isinstance(place, ClaimPath) and is_within(target, place):
            return Problem(
                field=_DESTINATION,
                value=context.spec.output.destination,
                message=f"it lies in {named.field} ({named.source}): the results would change the input that they are made from",
                fix=f"write to a directory beside the input, such as pvc://{target.claim}/{_NAME}",
                changes={_DESTINATION: free_directory(context, target.claim)},
            )
    return None


@rule(
    "output-overlaps-bucket-input",
    "A prefix holds inputs or results, not both",
    reads=(_DESTINATION, *_INPUTS),
    sources=("this product: a source in a bucket is every object below its prefix",),
    holds_for=OURS,
)
def output_overlaps_bucket_input(context: RuleContext) -> Problem | None:
    target = place_of(context)
    if not isinstance(target, BucketPath) or not same_service(context, "s3_endpoint"):
        return None
    places = [(named, parse_source(named.source)) for named in named_sources(context.spec)]
    inputs = [place for _, place in places if isinstance(place, BucketPath)]
    for named, place in places:
        if not isinstance(place, BucketPath) or place.bucket != target.bucket or not overlap(target.prefix, place.prefix):
            continue
        written = free_prefix(target.bucket, inputs)
        return Problem(
            field=_DESTINATION,
            value=context.spec.output.destination,
            message=f"it and {named.field} ({named.source}) lie one in the other: the next run would read the results as its input",
            fix=f"write to a prefix that no input has, such as {written}",
            changes={_DESTINATION: written},
        )
    return None


@rule(
    "output-replaces-model",
    "Results do not replace the model that they are made from",
    reads=(_DESTINATION, "model.source"),
    sources=("this product: publishing commits the merged model to the top of the repository",),
    holds_for=OURS,
)
def output_replaces_model(context: RuleContext) -> Problem | None:
    target, model = place_of(context), parse_source(context.spec.model.source)
    if not isinstance(target, HubPath) or not isinstance(model, HubPath) or model.is_dataset:
        return None
    # The Hub does not tell capitals from small letters.
    if target.repository.casefold() != model.repository.casefold() or not same_service(context, "hub_endpoint"):
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
    if allowed is None or isinstance(place_of(context), ClaimPath) or is_allowed(destination, allowed):
        return None
    listed = ", ".join(allowed) or "no destination outside the cluster"
    return Problem(
        field=_DESTINATION,
        value=destination,
        message=f"the profile allows {listed}",
        fix="write to a claim, or ask for a profile that allows it",
        changes={_DESTINATION: free_directory(context, "results")},
    )


RULES = (
    output_inside_input,
    output_overlaps_bucket_input,
    output_replaces_model,
    destination_not_allowed,
)

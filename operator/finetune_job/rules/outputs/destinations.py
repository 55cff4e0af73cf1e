"""Which destinations a profile lets through, and what a destination must not be."""

from __future__ import annotations

from finetune_job.api.base import BucketPath, ClaimPath, HubPath, parse_source
from finetune_job.plan.sources import named_sources
from finetune_job.rules.allowed import is_allowed
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule
from finetune_job.rules.outputs.places import free_directory, free_prefix, lies_below, place_of, same_service, writes_into
from finetune_job.rules.rule import Reproduction
from finetune_job.rules.sources import SOURCES

_DESTINATION = "output.destination"


@rule(
    "output-inside-input",
    "Results must not be written over what they are made from",
    reads=(_DESTINATION, *SOURCES),
    sources=("this product: a model is the files at the top of its directory, records are all files below theirs",),
    reproduction=Reproduction(
        "tests/pitfalls/test_destinations.py",
        "no error: the model's own card and checksums are replaced, and the next run reads the results' files as records",
    ),
    holds_for=OURS,
)
def output_inside_input(context: RuleContext) -> Problem | None:
    target = place_of(context)
    if not isinstance(target, ClaimPath):
        return None
    for named in named_sources(context.spec):
        if not writes_into(target, named):
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
        "tests/pitfalls/test_destinations.py",
        "DestinationRefusedError after the training: the prefix 'holds what does not belong to this release'; below a prefix of "
        "records no error: the next run fetches the results' files as records",
    ),
    holds_for=OURS,
)
def output_overlaps_bucket_input(context: RuleContext) -> Problem | None:
    target = place_of(context)
    if not isinstance(target, BucketPath) or not same_service(context, "s3_endpoint"):
        return None
    places = [(named, parse_source(named.source)) for named in named_sources(context.spec)]
    inputs = [place for _, place in places if isinstance(place, BucketPath)]
    for named, place in places:
        if not isinstance(place, BucketPath) or place.bucket != target.bucket:
            continue
        if lies_below(place.prefix, target.prefix):
            why = "publishing would refuse to add to it, and this would show only after the training"
        elif lies_below(target.prefix, place.prefix) and not named.is_model:
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
        message=f"it is the repository of model.source ({context.spec.model.source}): publishing would refuse to replace it, after "
        "the training, or replace it where it is a result of this operator itself",
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
        changes={_DESTINATION: free_directory(context)},
    )


RULES = (
    output_inside_input,
    output_overlaps_bucket_input,
    output_replaces_model,
    destination_not_allowed,
)

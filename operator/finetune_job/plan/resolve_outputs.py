"""The part of a plan that says what is made of the trained weights and where it goes."""

from __future__ import annotations

from pathlib import Path

from finetune_job.api.base import DEFAULT_TAG, ClaimPath, RegistryPath, parse_destination, size_bytes
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import MethodType
from finetune_job.api.profile import FineTuneProfileSpec, PublishSettings
from finetune_job.layout import WorkspaceLayout
from finetune_job.plan.choices import Choices, number
from finetune_job.plan.run_plan import MergePlanSettings
from finetune_job.plan.transfers import PublishPlan


def merge_plan(spec: FineTuneJobSpec) -> MergePlanSettings:
    """Full fine-tuning has nothing to merge."""
    return MergePlanSettings(
        enabled=spec.merge.enabled and spec.method.type is not MethodType.FULL,
        base=spec.merge.base,
        dtype=spec.merge.dtype,
        max_shard_bytes=size_bytes(spec.merge.max_shard_size),
        num_prompts=spec.merge.verify.num_prompts,
        max_kl_divergence=number(spec.merge.verify.max_kl_divergence),
        min_top1_agreement=number(spec.merge.verify.min_top1_agreement),
    )


def output_location(spec: FineTuneJobSpec, workspace: ClaimPath) -> ClaimPath:
    """Where the merge writes: to the user's claim, or to the workspace where the results go on from there."""
    place = parse_destination(spec.output.destination)
    if isinstance(place, ClaimPath):
        return place
    return ClaimPath(claim=workspace.claim, path=str(WorkspaceLayout(Path(workspace.path)).results))


def publish_plan(spec: FineTuneJobSpec, profile: FineTuneProfileSpec | None, choices: Choices) -> PublishPlan | None:
    """None where the results lie on the user's claim."""
    written = spec.output.destination
    place = parse_destination(written)
    if isinstance(place, ClaimPath):
        return None
    if isinstance(place, RegistryPath):
        tagged = written if written.endswith(f":{place.tag}") else None
        written = choices.pick("output.destination", tagged, f"{written}:{DEFAULT_TAG}", "container tools mean this tag by none")
    settings = profile.publish if profile is not None else PublishSettings()
    secret = spec.output.secret_ref
    return PublishPlan(
        destination=written,
        secret=None if secret is None else secret.name,
        private=spec.output.private,
        hub_endpoint=settings.hub_endpoint,
        s3_endpoint=settings.s3_endpoint,
        s3_region=settings.s3_region,
        plain_http_registries=tuple(settings.plain_http_registries),
    )

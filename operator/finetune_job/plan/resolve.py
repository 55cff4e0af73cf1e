"""Spec + profile + defaults -> RunPlan. Every value that the user left open is chosen here or beside it, once, and recorded."""

from __future__ import annotations

from finetune_job.api.base import claim_path
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.model import Attention
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.api.run import Rehearsal
from finetune_job.names import DEFAULT_PROFILE, workspace_claim_name
from finetune_job.plan.choices import Choices
from finetune_job.plan.resolve_inputs import Places, data_plan, fetch_plan, model_name
from finetune_job.plan.resolve_method import method_plan
from finetune_job.plan.resolve_outputs import merge_plan, output_location, publish_plan
from finetune_job.plan.resolve_placement import placement_of
from finetune_job.plan.resolve_sharding import fsdp_plan
from finetune_job.plan.resolve_training import checkpoint_plan, evaluation_plan, training_plan
from finetune_job.plan.run_plan import JobIdentity, ModelPlan, ParallelismPlan, RunPlan


def resolve(
    identity: JobIdentity, spec: FineTuneJobSpec, profile: FineTuneProfileSpec | None, profile_name: str | None = None
) -> RunPlan:
    """The plan of an accepted spec (one that no error finding of the rule book speaks against)."""
    choices = Choices()
    workspace = claim_path(
        f"pvc://{spec.workspace.claim_name or workspace_claim_name(identity.name)}/{identity.name}-{identity.uid[:8]}"
    )
    places = Places(workspace)
    return RunPlan(
        job=identity,
        model=ModelPlan(
            location=places.of(spec.model.source, spec.model.revision, "model"),
            name=model_name(spec.model.source),
            revision=spec.model.revision,
            dtype=spec.model.dtype,
            attention=choices.pick("model.attention", spec.model.attention, Attention.SDPA, "keeps packed documents apart"),
            allow_remote_code=spec.model.allow_remote_code,
        ),
        data=data_plan(spec, choices, places),
        fetch=fetch_plan(spec, profile, places),
        method=method_plan(spec, choices),
        training=training_plan(spec, choices),
        parallelism=ParallelismPlan(
            nodes=spec.parallelism.nodes,
            processes_per_node=spec.parallelism.processes_per_node,
            fsdp=fsdp_plan(spec, choices),
        ),
        checkpoint=checkpoint_plan(spec, choices),
        evaluation=evaluation_plan(spec.evaluation),
        merge=merge_plan(spec),
        workspace=workspace,
        output=output_location(spec, workspace),
        keeps_adapter=spec.output.adapter or not spec.merge.enabled,
        publish=publish_plan(spec, profile, choices),
        rehearses=spec.preflight.rehearsal is Rehearsal.RUN,
        placement=None if profile is None else placement_of(profile_name or spec.profile or DEFAULT_PROFILE, profile, spec.run),
        choices=tuple(choices.made),
    )

"""Resolves spec, profile and defaults to a RunPlan.

Every value that the user left unset is chosen once and recorded, here or in `inputs`, `resolve_model` and `resolve_training`.
Below `resolve` are its helpers: they resolve the merge, the destinations of results and the placement of pods.
"""

from __future__ import annotations

from pathlib import Path

from finetune_job.api.base import DEFAULT_TAG, ClaimPath, HubPath, RegistryPath, claim_path, parse_destination, size_bytes
from finetune_job.api.inputs import Attention
from finetune_job.api.job import FineTuneJobSpec, Rehearsal, RunSpec
from finetune_job.api.method import MethodType
from finetune_job.api.pod_settings import PodSettings
from finetune_job.api.profile import FineTuneProfileSpec, PublishSettings
from finetune_job.failures import MOST_RESTARTS_IN_POD
from finetune_job.layout import WorkspaceLayout
from finetune_job.names import DEFAULT_PROFILE, workspace_claim_name, workspace_folder
from finetune_job.plan.choices import Choices
from finetune_job.plan.inputs import SourceLocations, base_model_name, data_plan, fetch_plan
from finetune_job.plan.launch_plan import PlacedPods, Placement, PodPlacement, PublishPlan
from finetune_job.plan.resolve_model import fsdp_plan, method_plan
from finetune_job.plan.resolve_training import checkpoint_plan, evaluation_plan, training_plan
from finetune_job.plan.run_plan import (
    ATTENTION_FIELD,
    AddedTokenPlan,
    JobIdentity,
    MergePlanSettings,
    ModelPlan,
    ParallelismPlan,
    RunPlan,
    optional_float,
)

SAMPLE_ANSWERS = 3
"""Default number of sample answers, unless the report goes to a repository."""


def resolve(
    identity: JobIdentity,
    spec: FineTuneJobSpec,
    profile: FineTuneProfileSpec | None,
    profile_name: str | None = None,
    *,
    has_gpu: bool = False,
) -> RunPlan:
    """Return the plan of an accepted spec (one for which the rule book reports no error).

    has_gpu: whether ranks have a GPU; used only if there is no profile.
    """
    choices = Choices()
    on_gpu = has_gpu if profile is None else profile.gpu is not None
    claim = spec.workspace.claim_name or workspace_claim_name(identity.name)
    workspace = claim_path(f"pvc://{claim}/{workspace_folder(identity.name, identity.uid)}")
    places = SourceLocations(workspace)
    return RunPlan(
        job=identity,
        model=ModelPlan(
            location=places.of(spec.model.source, spec.model.revision, "model"),
            name=base_model_name(spec.model, choices, trains_adapter=spec.method.type is not MethodType.FULL),
            revision=spec.model.revision,
            dtype=spec.model.dtype,
            attention=attention_of(spec, choices, on_gpu=on_gpu),
            max_positions=spec.model.max_positions,
            added_tokens=tuple(AddedTokenPlan.model_validate(token.model_dump()) for token in spec.model.added_tokens or ()),
            allow_remote_code=spec.model.allow_remote_code,
        ),
        data=data_plan(spec, choices, places),
        fetch=fetch_plan(spec, profile, places),
        method=method_plan(spec, choices, on_gpu=on_gpu),
        training=training_plan(spec, choices, workspace, on_gpu=on_gpu),
        parallelism=ParallelismPlan(
            nodes=spec.parallelism.nodes,
            processes_per_node=spec.parallelism.processes_per_node,
            min_nodes=None if spec.parallelism.elastic is None else spec.parallelism.elastic.min_nodes,
            fsdp=fsdp_plan(spec, choices),
        ),
        checkpoint=checkpoint_plan(spec, choices),
        evaluation=evaluation_plan(spec.evaluation),
        merge=merge_plan(spec),
        workspace=workspace,
        output=output_location(spec, workspace),
        keeps_adapter=spec.output.adapter or not spec.merge.enabled,
        publish=publish_plan(spec, profile, choices),
        sample_answers=sample_answers(spec, choices),
        rehearses=spec.preflight.rehearsal is Rehearsal.RUN,
        placement=None
        if profile is None
        else placement_of(
            profile_name or spec.profile or DEFAULT_PROFILE, profile, spec.run, is_elastic=spec.parallelism.elastic is not None
        ),
        choices=tuple(choices.made),
    )


def attention_of(spec: FineTuneJobSpec, choices: Choices, *, on_gpu: bool) -> Attention:
    """Resolve the attention implementation. If the manifest leaves it unset, preflight chooses one that suits the model."""
    if not on_gpu:
        return choices.pick("model.attention", spec.model.attention, Attention.SDPA, "keeps packed documents apart")
    reason = "preflight chooses: varlen if the model's attention can be computed document by document, else sdpa"
    return choices.leave(ATTENTION_FIELD, spec.model.attention, Attention.SDPA, reason)


def merge_plan(spec: FineTuneJobSpec) -> MergePlanSettings:
    """Plan the merge; after full fine-tuning there is nothing to merge."""
    return MergePlanSettings(
        enabled=spec.merge.enabled and spec.method.type is not MethodType.FULL,
        base=spec.merge.base,
        dtype=spec.merge.dtype,
        max_shard_bytes=size_bytes(spec.merge.max_shard_size),
        num_prompts=spec.merge.verify.num_prompts,
        max_kl_divergence=optional_float(spec.merge.verify.max_kl_divergence),
        min_top1_agreement=optional_float(spec.merge.verify.min_top1_agreement),
    )


def output_location(spec: FineTuneJobSpec, workspace: ClaimPath) -> ClaimPath:
    """Return the directory of the results: on the user's claim, or on the workspace, from which they are then published."""
    place = parse_destination(spec.output.destination)
    if isinstance(place, ClaimPath):
        return place
    return ClaimPath(claim=workspace.claim, path=str(WorkspaceLayout(Path(workspace.path)).results))


def sample_answers(spec: FineTuneJobSpec, choices: Choices) -> int:
    """Return the number of sample answers: by default 0 for a repository, whose readers may not be allowed to see the data."""
    if spec.data.validation is None:
        return spec.output.sample_answers or 0
    if isinstance(parse_destination(spec.output.destination), HubPath | RegistryPath):
        return choices.pick(
            "output.sampleAnswers", spec.output.sample_answers, 0, "a repository may have readers who may not see the data"
        )
    return choices.pick("output.sampleAnswers", spec.output.sample_answers, SAMPLE_ANSWERS, "shows how both models answer")


def publish_plan(spec: FineTuneJobSpec, profile: FineTuneProfileSpec | None, choices: Choices) -> PublishPlan | None:
    """Plan the publication; None if the results go to the user's claim."""
    written = spec.output.destination
    place = parse_destination(written)
    if isinstance(place, ClaimPath):
        return None
    if isinstance(place, RegistryPath):
        tagged = written if written.endswith(f":{place.tag}") else None
        written = choices.pick("output.destination", tagged, f"{written}:{DEFAULT_TAG}", "the default tag of container tools")
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


def placement_of(name: str, profile: FineTuneProfileSpec, run: RunSpec, *, is_elastic: bool = False) -> Placement:
    """Return the placement of a job according to the profile, whose name is `name`."""
    pods = profile.pods
    return Placement(
        profile=name,
        trainer_image=profile.trainer_image,
        image_pull_policy=profile.image_pull_policy,
        resources=profile.resources,
        gpu_resource_name=profile.gpu.resource_name if profile.gpu else None,
        gpu_memory=profile.gpu.memory if profile.gpu else None,
        gpu_product=profile.gpu.product if profile.gpu else None,
        service_account_name=profile.service_account_name,
        run_as_user=profile.run_as_user,
        fs_group=profile.fs_group,
        supplemental_groups=profile.supplemental_groups,
        node_selector=profile.node_selector or {},
        pods=PlacedPods(
            fetch=_pod_placement(pods.fetch or pods.cpu),
            preflight=_pod_placement(pods.preflight or pods.cpu),
            train=_pod_placement(_with_queue_of_job(pods.train, run)),
            merge=_pod_placement(pods.merge or pods.cpu),
            publish=_pod_placement(pods.publish or pods.cpu),
        ),
        image_pull_secrets=tuple(reference.name for reference in profile.image_pull_secrets or ()),
        queue_during_preflight=profile.kueue.queue_during_preflight,
        requires_rehearsal=profile.require_rehearsal,
        scratch_storage=profile.scratch_storage,
        ca_bundle=profile.ca_bundle,
        elastic=profile.elastic if is_elastic else None,
        restarts_in_pod=MOST_RESTARTS_IN_POD,
        signing_key_secret=profile.publish.signing_key_secret.name if profile.publish.signing_key_secret else None,
    )


def _with_queue_of_job(settings: PodSettings, run: RunSpec) -> PodSettings:
    """Return the settings with the job's queue and priority, if it has any, in place of the profile's.

    With a queue, the job's priority is its WorkloadPriorityClass, which decides its place in the queue, and the profile still
    sets the PriorityClass of its pods. Without a queue, the job's priority is the PriorityClass of its pods.
    """
    queue = run.queue_name or settings.queue_name
    changed: dict[str, str | None] = {"queue_name": queue}
    if run.priority_class_name is not None:
        changed["queue_priority_class_name" if queue is not None else "priority_class_name"] = run.priority_class_name
    return settings.model_copy(update=changed)


def _pod_placement(settings: PodSettings) -> PodPlacement:
    document = settings.model_dump(mode="json", by_alias=True, exclude_none=True)
    fields = PodSettings.model_fields.items()
    return PodPlacement.model_validate({name: document[info.alias] for name, info in fields if info.alias in document})

"""The part of a plan that says where pods run: the profile's settings, and of the job its queue and priority."""

from __future__ import annotations

from finetune_job.api.pod_settings import PodSettings
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.api.run import RunSpec
from finetune_job.plan.placement import PlacedPods, Placement, PodPlacement


def placement_of(name: str, profile: FineTuneProfileSpec, run: RunSpec) -> Placement:
    """What the profile `name` decides for a job."""
    pods = profile.pods
    return Placement(
        profile=name,
        trainer_image=profile.trainer_image,
        image_pull_policy=profile.image_pull_policy,
        resources=profile.resources,
        gpu_resource_name=profile.gpu.resource_name if profile.gpu else None,
        gpu_memory=profile.gpu.memory if profile.gpu else None,
        service_account_name=profile.service_account_name,
        run_as_user=profile.run_as_user,
        fs_group=profile.fs_group,
        node_selector=profile.node_selector or {},
        pods=PlacedPods(
            fetch=_placed(pods.fetch or pods.cpu),
            preflight=_placed(pods.preflight or pods.cpu),
            train=_placed(_as_the_job_has_it(pods.train, run)),
            merge=_placed(pods.merge or pods.cpu),
            publish=_placed(pods.publish or pods.cpu),
        ),
        image_pull_secrets=tuple(one.name for one in profile.image_pull_secrets or ()),
        queue_during_preflight=profile.kueue.queue_during_preflight,
        checkpoint_priority_boost=profile.kueue.checkpoint_priority_boost,
    )


def _as_the_job_has_it(settings: PodSettings, run: RunSpec) -> PodSettings:
    """The job's queue and priority before the profile's.

    Under a queue the job's priority is its place there (WorkloadPriorityClass), and what its pods may displace once they run stays
    the profile's word; without a queue there is nothing but the PriorityClass of the pods.
    """
    queue = run.queue_name or settings.queue_name
    changed: dict[str, str | None] = {"queue_name": queue}
    if run.priority_class_name is not None:
        changed["queue_priority_class_name" if queue is not None else "priority_class_name"] = run.priority_class_name
    return settings.model_copy(update=changed)


def _placed(settings: PodSettings) -> PodPlacement:
    document = settings.model_dump(mode="json", by_alias=True, exclude_none=True)
    fields = PodSettings.model_fields.items()
    return PodPlacement.model_validate({name: document[info.alias] for name, info in fields if info.alias in document})

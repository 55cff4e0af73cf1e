"""What the profile decided at the start: images, resources, and where pods may run."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from finetune_job.api.profile import Resources
from finetune_job.names import Role
from finetune_job.plan.plan_model import PlanModel


class PlacementModel(PlanModel):
    """A part of the placement, which concerns the operator: a container ignores what it does not know here.

    A field that a release adds is not written while it has the value that means what the releases before it did, so that a trainer
    image of such a release reads every plan that asks for nothing new.
    """

    model_config = ConfigDict(extra="ignore")
    ADDED: ClassVar[frozenset[str]] = frozenset()
    """Fields that the first release with this class did not have."""

    @model_serializer(mode="wrap")
    def _without_what_says_nothing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        for name, default in _defaults(type(self)).items():
            if name in content and getattr(self, name) == default:
                del content[name]
        return content


@cache
def _defaults(model: type[PlacementModel]) -> dict[str, Any]:
    """What added fields mean when they are not written. Never changed, only compared with."""
    return {name: model.model_fields[name].get_default(call_default_factory=True) for name in model.ADDED}


class PodPlacement(PlacementModel):
    """How the pods of one role are placed; lists and objects in Kubernetes' own form, as they go into a PodSpec."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] = Field(default_factory=dict)
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    runtime_class_name: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    extra_resources: dict[str, str] = Field(default_factory=dict)
    resource_claims: tuple[dict[str, Any], ...] = ()
    env: tuple[dict[str, str], ...] = ()
    queue_name: str | None = None
    """Kueue's LocalQueue; None: the Jobs of this role wait in no queue."""
    queue_priority_class_name: str | None = None
    """Kueue's WorkloadPriorityClass."""


PodPlacement.ADDED = frozenset(PodPlacement.model_fields)


class PlacedPods(PlacementModel):
    """Pods by role."""

    ADDED = frozenset(map(str, Role))
    fetch: PodPlacement = PodPlacement()
    preflight: PodPlacement = PodPlacement()
    train: PodPlacement = PodPlacement()
    merge: PodPlacement = PodPlacement()
    publish: PodPlacement = PodPlacement()

    def of(self, role: Role) -> PodPlacement:
        """Of one role."""
        found: PodPlacement = getattr(self, str(role))
        return found


class Placement(PlacementModel):
    """What the profile decided at the start; later changes of the profile do not touch a run that has started."""

    ADDED = frozenset({"pods", "image_pull_secrets", "queue_during_preflight", "checkpoint_priority_boost"})
    profile: str
    trainer_image: str
    image_pull_policy: str
    resources: Resources
    gpu_resource_name: str | None
    gpu_memory: str | None = None
    """Memory of one device, as a quantity; None: training runs on the CPU."""
    service_account_name: str
    run_as_user: int | None
    fs_group: int | None
    node_selector: dict[str, str]
    """Node labels that training pods need, beside those of `pods.train`."""
    pods: PlacedPods = PlacedPods()
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with which the trainer image is pulled."""
    queue_during_preflight: bool = False
    """Whether the training Job waits in its queue from the beginning of preflight on, gated until it has passed."""
    checkpoint_priority_boost: int = 0
    """The most by which the priority of running training rises between two checkpoints."""

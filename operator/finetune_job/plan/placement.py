"""What the profile decided at the start: images, resources, and where pods may run."""

from __future__ import annotations

from pydantic import ConfigDict

from finetune_job.api.profile import Resources
from finetune_job.plan.plan_model import PlanModel


class Placement(PlanModel):
    """What the profile decided at the start; later changes of the profile do not touch a run that has started.

    It concerns the operator, so that a container ignores what it does not know here.
    """

    model_config = ConfigDict(extra="ignore")

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

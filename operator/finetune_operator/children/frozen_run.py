"""What every child of a started run is built from."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.plan.launch_plan import LaunchPlan
from finetune_job.plan.placement import Placement
from finetune_operator.children.ownership import Owner


@dataclass(frozen=True)
class FrozenRun:
    """A job with the plan that it started with."""

    owner: Owner
    plan: LaunchPlan
    placement: Placement
    """`plan.placement`, which a plan made for local mode would not have."""
    plan_sha256: str

"""The Job that merges, verifies and publishes on the CPU; where nothing is merged it publishes the trained weights."""

from __future__ import annotations

from typing import Any

from finetune_job.api.profile import RoleResources
from finetune_job.names import Role
from finetune_operator.children.cpu_job import single_pod_job
from finetune_operator.children.frozen_run import FrozenRun

GRACE_PERIOD_SECONDS = 30
"""The merge is resumable and saves nothing at the end: this only lets it write its report."""


def merge_job(run: FrozenRun, attempt: int, resources: RoleResources | None = None) -> dict[str, Any]:
    """Merge of one attempt."""
    return single_pod_job(run, Role.MERGE, attempt, GRACE_PERIOD_SECONDS, resources=resources)

"""The Job that checks model, data and settings on the CPU and prepares the data, before any accelerator is taken."""

from __future__ import annotations

from typing import Any

from finetune_job.api.profile import RoleResources
from finetune_job.names import Role
from finetune_operator.children.cpu_job import single_pod_job
from finetune_operator.children.frozen_run import FrozenRun

GRACE_PERIOD_SECONDS = 30
"""Preflight saves nothing on the way: this only lets it write its report."""


def preflight_job(run: FrozenRun, attempt: int, resources: RoleResources | None = None) -> dict[str, Any]:
    """Preflight of one attempt."""
    return single_pod_job(run, Role.PREFLIGHT, attempt, GRACE_PERIOD_SECONDS, resources=resources)

"""The Job that copies the results from the workspace to a destination outside the cluster."""

from __future__ import annotations

from typing import Any

from finetune_job.names import Role
from finetune_operator.children.cpu_job import single_pod_job
from finetune_operator.children.credentials import publish_credentials
from finetune_operator.children.frozen_run import FrozenRun

GRACE_PERIOD_SECONDS = 30
"""What has arrived is not sent again: this only lets it write its report."""


def publish_job(run: FrozenRun, attempt: int) -> dict[str, Any]:
    """Publication of one attempt."""
    credentials = [] if run.plan.publish is None else publish_credentials(run.plan.publish)
    return single_pod_job(run, Role.PUBLISH, attempt, GRACE_PERIOD_SECONDS, credentials=credentials)

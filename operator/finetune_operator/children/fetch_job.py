"""The Job that copies model and data to the workspace: its pod and the publish pod alone have credentials and a way out."""

from __future__ import annotations

from typing import Any

from finetune_job.names import Role
from finetune_operator.children.cpu_job import single_pod_job
from finetune_operator.children.credentials import fetch_credentials, variables_of_old_images
from finetune_operator.children.frozen_run import FrozenRun

GRACE_PERIOD_SECONDS = 30
"""What is complete is kept, and what is not is fetched again: this only lets it write its report."""


def fetch_job(run: FrozenRun, attempt: int) -> dict[str, Any]:
    """Fetch of one attempt."""
    credentials = [] if run.plan.fetch is None else fetch_credentials(run.plan.fetch)
    job = single_pod_job(run, Role.FETCH, attempt, GRACE_PERIOD_SECONDS, credentials=credentials)
    job["spec"]["template"]["spec"]["containers"][0]["env"] += variables_of_old_images(run.plan)
    return job

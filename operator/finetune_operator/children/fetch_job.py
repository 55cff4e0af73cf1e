"""The Job that copies model and data to the workspace: the only one with credentials and a way out of the cluster."""

from __future__ import annotations

from typing import Any

from finetune_job.api.fetch import HUB_TOKEN_VARIABLE, S3_VARIABLES
from finetune_job.names import Role
from finetune_job.plan.run_plan import FetchPlan
from finetune_operator.children.cpu_job import single_pod_job
from finetune_operator.children.frozen_run import FrozenRun

GRACE_PERIOD_SECONDS = 30
"""What is complete is kept, and what is not is fetched again: this only lets it write its report."""


def fetch_job(run: FrozenRun, attempt: int) -> dict[str, Any]:
    """Fetch of one attempt."""
    environment = [] if run.plan.fetch is None else credentials(run.plan.fetch)
    return single_pod_job(run, Role.FETCH, attempt, GRACE_PERIOD_SECONDS, environment)


def credentials(fetch: FetchPlan) -> list[dict[str, Any]]:
    """Credentials as variables that the kubelet fills in; neither the operator nor the plan ever holds one."""
    variables = []
    if fetch.hub_token is not None:
        variables.append(_variable(HUB_TOKEN_VARIABLE, fetch.hub_token.name, fetch.hub_token.key, required=True))
    if fetch.s3_secret is not None:
        variables += [_variable(name, fetch.s3_secret, name, required=required) for name, required in S3_VARIABLES.items()]
    return variables


def _variable(name: str, secret: str, key: str, *, required: bool) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": not required}}}

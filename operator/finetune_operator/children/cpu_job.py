"""What the Jobs of a single CPU pod (fetch, preflight, merge, publish) have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune_job.api.profile import RoleResources
from finetune_job.names import Role, batch_job_name
from finetune_operator.children.failure_policy import DISRUPTION_FAILS_THE_JOB
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.ownership import metadata
from finetune_operator.children.placement import queue_labels
from finetune_operator.children.pod_template import plan_arguments, pod_template


def single_pod_job(
    run: FrozenRun,
    role: Role,
    attempt: int,
    grace_period_seconds: int,
    *,
    credentials: Sequence[dict[str, Any]] = (),
    resources: RoleResources | None = None,
) -> dict[str, Any]:
    """A Job of one pod that is never replaced: the operator decides what follows a failure. `resources`: other than the plan's."""
    spec = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": DISRUPTION_FAILS_THE_JOB,
        "template": pod_template(
            run,
            role,
            attempt,
            arguments=plan_arguments(run, role, attempt),
            grace_period_seconds=grace_period_seconds,
            credentials=credentials,
            resources=resources,
        ),
    }
    name, queue = batch_job_name(run.owner.name, role, attempt), queue_labels(run.placement, role)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(run.owner, name, role=role, attempt=attempt, plan_sha256=run.plan_sha256, queue=queue),
        "spec": spec,
    }

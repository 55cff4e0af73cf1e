"""The Jobs of a single CPU pod: fetch, preflight, merge and publish. Only fetch and publish have credentials and a way out of
the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune_job.api.profile import RoleResources
from finetune_job.names import Role, batch_job_name
from finetune_operator.children.credentials import fetch_credentials, publish_credentials, variables_of_old_images
from finetune_operator.children.frozen_run import FrozenRun, metadata
from finetune_operator.children.placement import queue_labels
from finetune_operator.children.pod_template import DISRUPTION_FAILS_THE_JOB, plan_arguments, pod_template

CPU_GRACE_PERIOD_SECONDS = 30
"""None of these roles saves anything when it ends, and each continues with what is complete: the period only lets it write its
report."""


def single_pod_job(
    run: FrozenRun,
    role: Role,
    attempt: int,
    grace_period_seconds: int,
    *,
    credentials: Sequence[dict[str, Any]] = (),
    resources: RoleResources | None = None,
) -> dict[str, Any]:
    """A Job of one pod that is never replaced: the operator decides what follows a failure. `resources` replace those of the
    plan.
    """
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


def fetch_job(run: FrozenRun, attempt: int) -> dict[str, Any]:
    """The fetch Job of one attempt."""
    credentials = [] if run.plan.fetch is None else fetch_credentials(run.plan.fetch)
    job = single_pod_job(run, Role.FETCH, attempt, CPU_GRACE_PERIOD_SECONDS, credentials=credentials)
    job["spec"]["template"]["spec"]["containers"][0]["env"] += variables_of_old_images(run.plan)
    return job


def preflight_job(run: FrozenRun, attempt: int, resources: RoleResources | None = None) -> dict[str, Any]:
    """The preflight Job of one attempt."""
    return single_pod_job(run, Role.PREFLIGHT, attempt, CPU_GRACE_PERIOD_SECONDS, resources=resources)


def merge_job(run: FrozenRun, attempt: int, resources: RoleResources | None = None) -> dict[str, Any]:
    """The merge Job of one attempt."""
    return single_pod_job(run, Role.MERGE, attempt, CPU_GRACE_PERIOD_SECONDS, resources=resources)


def publish_job(run: FrozenRun, attempt: int) -> dict[str, Any]:
    """The publish Job of one attempt."""
    key = run.placement.signing_key_secret
    credentials = [] if run.plan.publish is None else publish_credentials(run.plan.publish, key)
    return single_pod_job(run, Role.PUBLISH, attempt, CPU_GRACE_PERIOD_SECONDS, credentials=credentials)

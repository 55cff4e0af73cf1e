"""Jobs that consist of a single CPU pod: fetch, preflight, merge and publish. Only fetch and publish have credentials and may
reach addresses outside the cluster.
"""

from __future__ import annotations

from typing import Any

from finetune_job.api.profile import RoleResources
from finetune_job.names import Role, batch_job_name
from finetune_operator.children.credentials import fetch_credentials, publish_credentials, variables_of_old_images
from finetune_operator.children.frozen_run import FrozenRun, metadata
from finetune_operator.children.placement import queue_labels
from finetune_operator.children.pod_template import DISRUPTION_FAILS_THE_JOB, plan_arguments, pod_template

CPU_GRACE_PERIOD_SECONDS = 30
"""Grace period in which a stopped pod can write its report. It has nothing else to save, because the next attempt reuses all
completed parts."""


def cpu_job(run: FrozenRun, role: Role, attempt: int, resources: RoleResources | None = None) -> dict[str, Any]:
    """The Job of one attempt of a role. Kubernetes never replaces its pod: the operator decides what follows a failure.
    `resources` override those of the plan.
    """
    credentials: list[dict[str, Any]] = []
    if role is Role.FETCH and run.plan.fetch is not None:
        credentials = fetch_credentials(run.plan.fetch)
    elif role is Role.PUBLISH and run.plan.publish is not None:
        credentials = publish_credentials(run.plan.publish, run.placement.signing_key_secret)
    template = pod_template(
        run,
        role,
        attempt,
        arguments=plan_arguments(run, role, attempt),
        grace_period_seconds=CPU_GRACE_PERIOD_SECONDS,
        credentials=credentials,
        resources=resources,
    )
    if role is Role.FETCH:
        template["spec"]["containers"][0]["env"] += variables_of_old_images(run.plan)
    spec = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": DISRUPTION_FAILS_THE_JOB,
        "template": template,
    }
    name, queue = batch_job_name(run.owner.name, role, attempt), queue_labels(run.placement, role)
    head = metadata(run.owner, name, role=role, attempt=attempt, plan_sha256=run.plan_sha256, queue=queue)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": head, "spec": spec}

"""The pod template that the Jobs of all roles share: one container, the plan, the claims, scratch space, resources, security
contexts, and the pod failure policy.

Our own settings are never environment variables: containers read the plan. Variables only configure the libraries through which
ranks communicate (NCCL, Gloo, UCX; from the profile) and the CAs that OpenSSL trusts. Credentials are files that the kubelet
mounts, and only in the fetch and publish pods. No pod has Kubernetes credentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune_job.api.profile import RoleResources
from finetune_job.names import (
    CA_MOUNT,
    CLAIMS_MOUNT,
    CREDENTIALS_MOUNT,
    PLAN_KEY,
    PLAN_MOUNT,
    TERMINATION_LOG,
    Role,
    plan_configmap_name,
)
from finetune_job.plan.inputs import input_locations
from finetune_job.plan.launch_plan import LaunchPlan, Placement
from finetune_operator.children.credentials import credentials_volume
from finetune_operator.children.frozen_run import FrozenRun, labels
from finetune_operator.children.placement import apply_placement

CONTAINER_NAME = "trainer"
SCRATCH_MOUNT = "/tmp"  # noqa: S108 - the pod's own volume
"""The only writable directory besides the claims and shared memory; also the home directory."""
SHARED_MEMORY_MOUNT = "/dev/shm"  # noqa: S108 - the pod's own volume
"""Shared memory of data loaders and collectives; the default of 64 MiB is too small for both."""
CA_FILE = "ca.crt"
DISK = "ephemeral-storage"
SHARED_MEMORY_VOLUME = "shared-memory"
"""Name of the in-memory volume at SHARED_MEMORY_MOUNT."""


def pod_template(
    run: FrozenRun,
    role: Role,
    attempt: int,
    *,
    arguments: list[str],
    grace_period_seconds: int,
    credentials: Sequence[dict[str, Any]] = (),
    resources: RoleResources | None = None,
) -> dict[str, Any]:
    """Template of a role's pods. `arguments` follow the image's entry point (`tini -- python -m finetune_trainer`).

    `credentials`: sources of a projected volume.
    """
    plan, placement = run.plan, run.placement
    resources = resources or getattr(placement.resources, role.value)
    amounts = {"cpu": resources.cpu, "memory": resources.memory}
    if role is Role.TRAIN and placement.gpu_resource_name is not None:
        amounts[placement.gpu_resource_name] = str(plan.parallelism.processes_per_node)
    pods = placement.pods.of(role)
    # A queue only admits a pod if its quota covers all of the pod's resources, and few quotas cover ephemeral storage.
    if placement.scratch_storage is not None and pods.queue_name is None and DISK not in pods.extra_resources:
        amounts[DISK] = placement.scratch_storage
    claims = claim_access(plan, role)
    volumes: list[dict[str, Any]] = [
        {
            "name": "plan",
            "configMap": {"name": plan_configmap_name(run.owner.name), "items": [{"key": PLAN_KEY, "path": PLAN_KEY}]},
        },
        {"name": "tmp", "emptyDir": {} if placement.scratch_storage is None else {"sizeLimit": placement.scratch_storage}},
        {"name": SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": resources.shared_memory}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "plan", "mountPath": PLAN_MOUNT, "readOnly": True},
        {"name": "tmp", "mountPath": SCRATCH_MOUNT},
        {"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY_MOUNT},
    ]
    for number, (claim, writable) in enumerate(sorted(claims.items())):
        # Volumes are numbered, because claim names may contain dots but volume names may not.
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": f"{CLAIMS_MOUNT}/{claim}", "readOnly": not writable})
    if credentials:
        volumes.append(credentials_volume(credentials))
        mounts.append({"name": volumes[-1]["name"], "mountPath": CREDENTIALS_MOUNT, "readOnly": True})
    variables = [{"name": "HOME", "value": SCRATCH_MOUNT}]
    if placement.ca_bundle is not None and role in (Role.FETCH, Role.PUBLISH):
        items = [{"key": placement.ca_bundle.key, "path": CA_FILE}]
        volumes.append({"name": "authorities", "configMap": {"name": placement.ca_bundle.config_map, "items": items}})
        mounts.append({"name": "authorities", "mountPath": CA_MOUNT, "readOnly": True})
        # OpenSSL and the clients of the Hub, of object stores and of registries read this variable.
        variables.append({"name": "SSL_CERT_FILE", "value": f"{CA_MOUNT}/{CA_FILE}"})
    container: dict[str, Any] = {
        "name": CONTAINER_NAME,
        "image": placement.trainer_image,
        "imagePullPolicy": placement.image_pull_policy,
        "args": arguments,
        "env": variables,
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "securityContext": container_security_context(),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": placement.service_account_name,
        "securityContext": pod_security_context(placement),
        "terminationGracePeriodSeconds": grace_period_seconds,
        "containers": [container],
        "volumes": volumes,
    }
    template: dict[str, Any] = {"metadata": {"labels": labels(run.owner, role, attempt)}, "spec": spec}
    apply_placement(template, placement, role)
    return template


def plan_arguments(run: FrozenRun, role: Role, attempt: int) -> list[str]:
    """Return the command-line arguments that all roles share."""
    return [str(role), "--plan", f"{PLAN_MOUNT}/{PLAN_KEY}", "--plan-sha256", run.plan_sha256, "--attempt", str(attempt)]


def claim_access(plan: LaunchPlan, role: Role) -> dict[str, bool]:
    """Return the claims that a role's pods mount, and whether they may write to each.

    Fetch and publish can reach addresses outside the cluster, so their pods mount only the workspace, not the user's other
    claims. Training reads prepared data from the workspace and writes weights there, so its pods mount neither the raw data nor
    the output. A claim that is both an input and the workspace or output is writable.
    """
    if role in (Role.FETCH, Role.PUBLISH):
        return {plan.workspace.claim: True}
    readable = {plan.model.location.claim}
    writable = {plan.workspace.claim}
    if role is not Role.TRAIN:
        readable |= {location.claim for _, location in input_locations(plan)}
        writable.add(plan.output.claim)
    return {claim: claim in writable for claim in readable | writable}


def pod_security_context(placement: Placement) -> dict[str, Any]:
    """The security context of a pod. User and group appear only if the profile sets them: some platforms assign their own."""
    context: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if placement.run_as_user is not None:
        context["runAsUser"] = placement.run_as_user
    if placement.supplemental_groups:
        context["supplementalGroups"] = placement.supplemental_groups
    if placement.fs_group is not None:
        context["fsGroup"] = placement.fs_group
        # Changing the group of millions of files at every start would take longer than the start itself.
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    return context


def container_security_context() -> dict[str, Any]:
    """The security context of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


DISRUPTION_FAILS_THE_JOB: dict[str, Any] = {
    "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
}
"""The only rule of the pod failure policy. An exit-code rule such as `NotIn [0]` would turn a queue's suspension into a failure,
because suspended ranks exit at different moments. All other failures fail the Job anyway, because it has no retries."""

"""Security contexts that pass Pod Security `restricted`, under whatever user ID the platform assigns."""

from __future__ import annotations

from typing import Any

from finetune_job.plan.placement import Placement


def pod_security_context(placement: Placement) -> dict[str, Any]:
    """Of the pod. User and group appear only where the profile sets them: some platforms assign their own."""
    context: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if placement.run_as_user is not None:
        context["runAsUser"] = placement.run_as_user
    if placement.fs_group is not None:
        context["fsGroup"] = placement.fs_group
        # Walking a claim with millions of files at every start would take longer than the start itself.
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    return context


def container_security_context() -> dict[str, Any]:
    """Of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }

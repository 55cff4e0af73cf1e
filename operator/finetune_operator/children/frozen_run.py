"""The parts that all children share: owner and labels, the run with its frozen plan, and the ConfigMap through which containers
read this plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.names import (
    ANNOTATION_PLAN_SHA256,
    API_VERSION,
    JOB_KIND,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_MANAGED_BY,
    LABEL_ROLE,
    MANAGED_BY,
    PLAN_KEY,
    Role,
    plan_configmap_name,
)
from finetune_job.plan.digest import text_sha256
from finetune_job.plan.launch_plan import LaunchPlan, Placement


@dataclass(frozen=True)
class Owner:
    """The FineTuneJob that a child belongs to."""

    namespace: str
    name: str
    uid: str


def labels(owner: Owner, role: Role | None = None, attempt: int | None = None) -> dict[str, str]:
    """Labels of a child; with role and attempt, labels of that attempt's Job and pods."""
    labels_of_child = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: owner.name, LABEL_JOB_UID: owner.uid}
    if role is not None:
        labels_of_child[LABEL_ROLE] = str(role)
    if attempt is not None:
        labels_of_child[LABEL_ATTEMPT] = str(attempt)
    return labels_of_child


def metadata(
    owner: Owner,
    name: str,
    *,
    role: Role | None = None,
    attempt: int | None = None,
    plan_sha256: str = "",
    queue: Mapping[str, str] | None = None,
    owned: bool = True,
) -> dict[str, Any]:
    """Metadata of a child. `queue`: labels by which a queue finds the child.

    There is no digest of the child: the child's content is never compared, because queues and webhooks may change a Job. The
    plan is verified by its digest in status.
    """
    fields: dict[str, Any] = {
        "name": name,
        "namespace": owner.namespace,
        "labels": {**(queue or {}), **labels(owner, role, attempt)},
    }
    if plan_sha256:
        fields["annotations"] = {ANNOTATION_PLAN_SHA256: plan_sha256}
    if owned:
        # Because of the controller reference, garbage collection deletes the child with its job.
        reference = {"apiVersion": API_VERSION, "kind": JOB_KIND, "name": owner.name, "uid": owner.uid}
        fields["ownerReferences"] = [reference | {"controller": True, "blockOwnerDeletion": True}]
    return fields


@dataclass(frozen=True)
class FrozenRun:
    """A job with the plan that it started with."""

    owner: Owner
    plan: LaunchPlan
    placement: Placement
    """`plan.placement`; only plans for local mode have none."""
    plan_sha256: str


def plan_configmap(owner: Owner, plan_json: str) -> dict[str, Any]:
    """Build the ConfigMap of the plan. `plan_json`: the canonical JSON, byte for byte as it was digested.

    `immutable` spares kubelets from watching it. Whether the object was replaced is detected by the digest, not by this flag.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(owner, plan_configmap_name(owner.name), plan_sha256=text_sha256(plan_json)),
        "immutable": True,
        "data": {PLAN_KEY: plan_json},
    }

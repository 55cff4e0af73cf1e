"""What makes an object a child: controller owner reference, labels, and the digest of the plan that it was made from."""

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
    Role,
)


@dataclass(frozen=True)
class Owner:
    """The FineTuneJob that a child belongs to."""

    namespace: str
    name: str
    uid: str


def owner_reference(owner: Owner) -> dict[str, Any]:
    """The controller reference: garbage collection deletes the child with its job."""
    return {
        "apiVersion": API_VERSION,
        "kind": JOB_KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def labels(owner: Owner, role: Role | None = None, attempt: int | None = None) -> dict[str, str]:
    """Labels of a child, and of the pods of a role and attempt."""
    found = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: owner.name, LABEL_JOB_UID: owner.uid}
    if role is not None:
        found[LABEL_ROLE] = str(role)
    if attempt is not None:
        found[LABEL_ATTEMPT] = str(attempt)
    return found


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
    """Metadata of a child. `queue`: labels by which a queue finds it.

    There is no digest of the child's own content: what stands in a Job is changed by queues and webhooks as they like, and is not
    ours to compare; the plan is proven by its digest in status.
    """
    found: dict[str, Any] = {
        "name": name,
        "namespace": owner.namespace,
        "labels": {**(queue or {}), **labels(owner, role, attempt)},
    }
    if plan_sha256:
        found["annotations"] = {ANNOTATION_PLAN_SHA256: plan_sha256}
    if owned:
        found["ownerReferences"] = [owner_reference(owner)]
    return found

"""What makes an object a child: controller owner reference, labels, and the digest of its own specification."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from finetune_job.names import (
    ANNOTATION_PLAN_SHA256,
    ANNOTATION_SPEC_SHA256,
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
from finetune_job.plan.digest import text_sha256


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
    content: Any,
    *,
    role: Role | None = None,
    attempt: int | None = None,
    plan_sha256: str = "",
    owned: bool = True,
) -> dict[str, Any]:
    """Metadata of a child. `content`: the JSON value whose digest the annotation holds, so that drift can be seen."""
    annotations = {ANNOTATION_SPEC_SHA256: text_sha256(json.dumps(content, sort_keys=True, separators=(",", ":")))}
    if plan_sha256:
        annotations[ANNOTATION_PLAN_SHA256] = plan_sha256
    found: dict[str, Any] = {
        "name": name,
        "namespace": owner.namespace,
        "labels": labels(owner, role, attempt),
        "annotations": annotations,
    }
    if owned:
        found["ownerReferences"] = [owner_reference(owner)]
    return found

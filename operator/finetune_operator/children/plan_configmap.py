"""The ConfigMap that carries the frozen plan to every container."""

from __future__ import annotations

from typing import Any

from finetune_job.names import PLAN_KEY, plan_configmap_name
from finetune_job.plan.digest import text_sha256
from finetune_operator.children.ownership import Owner, metadata


def plan_configmap(owner: Owner, plan_json: str) -> dict[str, Any]:
    """`plan_json`: the canonical JSON of the plan, byte for byte what its digest was made from.

    `immutable` spares the kubelets a watch; that nobody replaces the object is checked by digest, not by this flag.
    """
    data = {PLAN_KEY: plan_json}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(owner, plan_configmap_name(owner.name), plan_sha256=text_sha256(plan_json)),
        "immutable": True,
        "data": data,
    }

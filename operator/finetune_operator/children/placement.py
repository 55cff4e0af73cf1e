"""Translates the frozen placement (where a role's pods run and which queue admits them) into fields of Kubernetes and Kueue.

Whatever a queue or an admission webhook adds to a Job or pod later (suspension, node selectors, tolerations, scheduling gates) is
left alone: existing objects are never compared with what is built here, nor restored to it.
"""

from __future__ import annotations

from typing import Any

from finetune_job.names import Role
from finetune_job.plan.launch_plan import Placement

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
GATES_ANNOTATION = "kueue.x-k8s.io/admission-gated-by"
"""Annotation with comma-separated names of gates. A Job with any gate stays in Kueue's queue and is not admitted. Gates can only
be set when the Job is created, and be removed later.
https://kueue.sigs.k8s.io/docs/reference/labels-and-annotations/"""
PREFLIGHT_GATE = "finetune.dev/preflight"


def apply_placement(template: dict[str, Any], placement: Placement, role: Role) -> None:
    """Add the placement of a role to its pod template. Labels that the template already has are ours and take precedence."""
    pods, metadata, spec = placement.pods.of(role), template["metadata"], template["spec"]
    metadata["labels"] = {**pods.labels, **metadata["labels"]}
    if pods.annotations:
        metadata["annotations"] = dict(pods.annotations)
    node_selector = {**(placement.node_selector if role is Role.TRAIN else {}), **pods.node_selector}
    fields: dict[str, Any] = {
        "nodeSelector": node_selector,
        "tolerations": list(pods.tolerations),
        "affinity": pods.affinity,
        "schedulerName": pods.scheduler_name,
        "priorityClassName": pods.priority_class_name,
        "runtimeClassName": pods.runtime_class_name,
        "imagePullSecrets": [{"name": name} for name in placement.image_pull_secrets],
        "resourceClaims": list(pods.resource_claims),
    }
    spec.update({name: value for name, value in fields.items() if value})
    (container,) = spec["containers"]
    container["env"] += list(pods.env)
    for amounts in (container["resources"]["requests"], container["resources"]["limits"]):
        amounts.update({**pods.extra_resources, **amounts})
    if pods.resource_claims:
        container["resources"]["claims"] = [{"name": claim["name"]} for claim in pods.resource_claims]


def queue_labels(placement: Placement, role: Role) -> dict[str, str]:
    """Labels from which Kueue learns queue and priority of a role's Jobs; none without a queue.

    They are set only on Jobs: if they were on the FineTuneJob, a queue that manages custom kinds would delay every role.
    """
    pods = placement.pods.of(role)
    if pods.queue_name is None:
        return {}
    priority = {} if pods.queue_priority_class_name is None else {QUEUE_PRIORITY_LABEL: pods.queue_priority_class_name}
    return {QUEUE_LABEL: pods.queue_name, **priority}

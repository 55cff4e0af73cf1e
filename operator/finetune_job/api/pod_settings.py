"""The placement of a role's pods: settings that the platform team writes in a profile, in the words and forms of Kubernetes.

Only platform administrators write profiles, so only the form of these settings is checked. What the operator itself sets (names,
labels, mounts, security, the variables that a container reads) cannot be overridden.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from finetune_job.api.base import ApiModel
from finetune_job.names import GROUP, LABEL_MANAGED_BY

_FACTORS = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$", max_length=24)]
"""A Kubernetes resource quantity."""
ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
_QUALIFIED_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
QualifiedName = Annotated[str, StringConstraints(pattern=_QUALIFIED_NAME, max_length=317)]
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317)]
"""Key of a label: a name of at most 63 characters, optionally after a DNS prefix of at most 253 characters and a slash."""
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)]

_OURS = (f"{GROUP}/", "batch.kubernetes.io/")
"""Prefixes of labels and annotations by which the operator and the Job controller find pods."""
_OUR_NAMES = (LABEL_MANAGED_BY, "job-name", "controller-uid")
_OUR_RESOURCES = ("cpu", "memory")


def quantity_bytes(text: str) -> int:
    """Convert a Kubernetes quantity such as 80Gi to bytes. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a quantity of memory; write it as in 80Gi")
    return int(float(match[1]) * _FACTORS[match[2] or ""])


def _qualified(entries: dict[str, str]) -> dict[str, str]:
    for key in entries:
        if re.fullmatch(_QUALIFIED_NAME, key) is None:
            raise ValueError(f"{key!r} is not a name; write it as in example.com/name")
    return entries


def _not_ours(entries: dict[str, str]) -> dict[str, str]:
    taken = [key for key in entries if key.startswith(_OURS) or key in _OUR_NAMES]
    if taken:
        raise ValueError(f"{taken[0]!r} is set by the operator or by Kubernetes, which find pods by it; remove it")
    return entries


def _not_our_resources(entries: dict[str, str]) -> dict[str, str]:
    taken = [name for name in entries if name in _OUR_RESOURCES]
    if taken:
        raise ValueError(f"{taken[0]!r} is set by `resources`, by role; remove it here")
    return entries


def _no_name_twice(entries: list[Any]) -> list[Any]:
    names = [entry.name for entry in entries]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is named twice; name it once")
    return entries


class Toleration(ApiModel):
    """A taint that the pods tolerate, as in a PodSpec."""

    key: QualifiedName | None = None
    """Key of the taint. Unset, with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Whether the taint's value must be `value` (Equal), or may be anything (Exists)."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Unset: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Seconds for which a NoExecute taint is tolerated. Unset: no limit."""

    @model_validator(mode="after")
    def _as_kubernetes_takes_it(self) -> Self:
        if self.key is None and self.operator != "Exists":
            raise ValueError("a toleration without a key tolerates every taint; write operator: Exists, or name the key")
        if self.operator == "Exists" and self.value:
            raise ValueError("operator Exists takes no value; remove it, or write operator: Equal")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds belongs to effect NoExecute; set the effect, or remove tolerationSeconds")
        return self


AffinityTerms = Annotated[dict[str, Any], Field(max_length=2)]
"""`requiredDuringSchedulingIgnoredDuringExecution` and `preferredDuringSchedulingIgnoredDuringExecution`, as in a PodSpec."""


class Affinity(ApiModel):
    """Affinity of the pods, as in a PodSpec."""

    node_affinity: AffinityTerms | None = None
    """Place on nodes with matching labels."""
    pod_affinity: AffinityTerms | None = None
    """Place on nodes that run matching pods."""
    pod_anti_affinity: AffinityTerms | None = None
    """Do not place on nodes that run matching pods."""


class PodResourceClaim(ApiModel):
    """A claim for devices (Dynamic Resource Allocation), as in a PodSpec. The container gets every claim in the list."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    """Name inside the pod."""
    resource_claim_name: ObjectName | None = None
    """A ResourceClaim of the job's namespace, shared by the pods."""
    resource_claim_template_name: ObjectName | None = None
    """A ResourceClaimTemplate of the job's namespace, from which each pod gets a claim of its own."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.resource_claim_name is None) == (self.resource_claim_template_name is None):
            raise ValueError(f"claim {self.name!r}: set exactly one of resourceClaimName and resourceClaimTemplateName")
        return self


class NetworkVariable(ApiModel):
    """An environment variable for the communication libraries of the ranks; the trainer itself reads none of them."""

    name: Annotated[
        str, StringConstraints(pattern=r"^(NCCL|OFI_NCCL|RCCL|NVSHMEM|GLOO|UCX|FI|IBV|RDMAV|MLX5)_[A-Z0-9_]+$", max_length=128)
    ]
    """Name of the variable, such as NCCL_IB_HCA or GLOO_SOCKET_IFNAME."""
    value: Annotated[str, StringConstraints(max_length=1024)]
    """Value of the variable."""


NodeLabels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32), AfterValidator(_qualified)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32), AfterValidator(_qualified), AfterValidator(_not_ours)]
AnnotationText = Annotated[str, StringConstraints(max_length=4096)]
Annotations = Annotated[
    dict[LabelKey, AnnotationText], Field(max_length=32), AfterValidator(_qualified), AfterValidator(_not_ours)
]
Amounts = Annotated[
    dict[LabelKey, Quantity], Field(max_length=16), AfterValidator(_qualified), AfterValidator(_not_our_resources)
]


class PodSettings(ApiModel):
    """Where the pods of a role run, and in which queue they wait."""

    node_selector: NodeLabels | None = None
    """Node labels that the pods need."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = None
    """Taints that the pods tolerate: GPU nodes are usually tainted."""
    affinity: Affinity | None = None
    """Nodes that the pods require or prefer."""
    scheduler_name: ObjectName | None = None
    """Scheduler, such as volcano or kai-scheduler. Unset: the cluster's own."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods. Unset: the cluster's default."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods. Unset: the node's default."""
    labels: Labels | None = None
    """Labels of the pods, such as those by which a scheduler groups them."""
    annotations: Annotations | None = None
    """Annotations of the pods, such as `kueue.x-k8s.io/podset-preferred-topology`."""
    extra_resources: Amounts | None = None
    """Further resources of each pod, such as `rdma/hca: "1"`."""
    resource_claims: Annotated[list[PodResourceClaim], Field(max_length=8), AfterValidator(_no_name_twice)] | None = None
    """Claims for devices (Dynamic Resource Allocation)."""
    env: Annotated[list[NetworkVariable], Field(max_length=64), AfterValidator(_no_name_twice)] | None = None
    """Environment variables for the communication libraries of the ranks: NCCL, Gloo, UCX, libfabric, verbs."""
    queue_name: ObjectName | None = None
    """LocalQueue of Kueue, in the job's namespace, that admits the Jobs of this role. Unset: no queue. For training,
    `run.queueName` of the job takes precedence."""
    queue_priority_class_name: ObjectName | None = None
    """WorkloadPriorityClass of the Jobs under a queue. Unset: the queue uses the PriorityClass of the pods. For training,
    `run.priorityClassName` of the job takes precedence."""


class PodsByRole(ApiModel):
    """Settings of pods by role."""

    train: PodSettings = PodSettings.model_construct()
    """Settings of training pods, the only ones with accelerators."""
    cpu: PodSettings = PodSettings.model_construct()
    """Settings of the pods of all other roles without an entry below."""
    fetch: PodSettings | None = None
    """Settings of the pod that copies model and data to the workspace. Unset: as `cpu`."""
    preflight: PodSettings | None = None
    """Settings of the pod that checks model, data and settings. Unset: as `cpu`."""
    merge: PodSettings | None = None
    """Settings of the pod that merges and verifies. Unset: as `cpu`."""
    publish: PodSettings | None = None
    """Settings of the pod that copies the results out of the cluster. Unset: as `cpu`."""

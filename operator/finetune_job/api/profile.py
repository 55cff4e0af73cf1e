"""The FineTuneProfile: images, resources and limits that administrators set, and which addresses a profile allows."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from finetune_job.api.base import ApiModel, RegistryPath, parse_destination
from finetune_job.api.job import ObjectMeta
from finetune_job.api.namespace_selector import NamespaceSelector
from finetune_job.api.pod_settings import NodeLabels, ObjectName, PodsByRole, Quantity
from finetune_job.api.size import MAX_PROFILE_BYTES, check_size


class RoleResources(ApiModel):
    """Resources of one container; requests equal limits."""

    cpu: Quantity = "2"
    """CPU cores."""
    memory: Quantity = "4Gi"
    """Memory."""
    shared_memory: Quantity = "1Gi"
    """Size limit of /dev/shm, counted against memory."""


class PreflightResources(RoleResources):
    """Resources of the preflight container."""

    memory: Quantity = "8Gi"
    """Memory."""


class TrainResources(RoleResources):
    """Resources of the training container."""

    cpu: Quantity = "8"
    """CPU cores."""
    memory: Quantity = "64Gi"
    """Memory."""
    shared_memory: Quantity = "8Gi"
    """Size limit of /dev/shm, counted against memory."""


class MergeResources(RoleResources):
    """Resources of the merge container."""

    memory: Quantity = "8Gi"
    """Memory."""


class TransferResources(RoleResources):
    """Resources of a container that copies files."""

    cpu: Quantity = "1"
    """CPU cores."""
    memory: Quantity = "2Gi"
    """Memory."""


class NodeCondition(ApiModel):
    """A condition of a node that shows that one of its GPUs is broken."""

    type: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_./]{0,314}[A-Za-z0-9])?$")]
    """Type of the condition, such as GpuXidError."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Status that the condition has if a GPU is broken."""


class GpuResource(ApiModel):
    """The accelerator of a training pod."""

    resource_name: Annotated[str, StringConstraints(max_length=253)] = "nvidia.com/gpu"
    """Extended resource; each pod requests processesPerNode units of it."""
    memory: Quantity = "80Gi"
    """Memory of one device."""
    product: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    """Name of the device in its driver or in the label nvidia.com/gpu.product, such as NVIDIA-H100-80GB-HBM3; used to calculate
    tokens per second. Unset: the value of that label in the node selector of training pods."""
    price_per_hour: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?$")] | None = None
    """Price of one device for an hour, in a currency of the platform's choice, for `finetune cost` and the metrics. Unset: no
    cost is counted."""
    fault_conditions: Annotated[list[NodeCondition], Field(max_length=32)] = Field(default_factory=list)
    """Conditions that an agent which watches GPUs writes on nodes. If a node gets one of them while a gang trains on it, and the
    gang then fails for no other known cause, the failure is DeviceFault and not counted. The operator needs permission to
    read nodes (`rbac.readNodes` of its chart). Not frozen with a plan: changes apply to running jobs at once."""


class Resources(ApiModel):
    """Resources by role."""

    fetch: TransferResources = TransferResources.model_construct()
    """CPU pod that copies model and data to the workspace."""
    preflight: PreflightResources = PreflightResources.model_construct()
    """CPU pod that checks model, data and settings."""
    train: TrainResources = TrainResources.model_construct()
    """Training pod, in addition to its GPUs."""
    merge: MergeResources = MergeResources.model_construct()
    """CPU pod that merges and verifies."""
    publish: TransferResources = TransferResources.model_construct()
    """CPU pod that copies the results to a destination outside the cluster."""


class SecretReference(ApiModel):
    """A Secret by its name."""

    name: ObjectName
    """Name of the Secret."""


class Endpoints(ApiModel):
    """Services outside the cluster."""

    hub_endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+(/[^\s]*)?$", max_length=512)] | None = None
    """Address of the Hub or of a mirror of it. Unset: huggingface.co."""
    s3_endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+$", max_length=512)] | None = None
    """Address of the object store. Unset: that of AWS."""
    s3_region: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$", max_length=64)] | None = None
    """Region of the object store. Unset: us-east-1."""


class CaBundle(ApiModel):
    """Certificates of authorities, in a ConfigMap of the job's namespace."""

    config_map: ObjectName
    """ConfigMap, such as the one that trust-manager keeps in every namespace."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "ca.crt"
    """Key with the certificates in PEM."""


class FetchSettings(Endpoints):
    """Sources outside the cluster."""

    allowed_sources: (
        Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=512)]], Field(max_length=256)] | None
    ) = None
    """Prefixes of the `hf://` and `s3://` sources that jobs may name, such as `hf://our-org/`; `hf://` and `s3://` allow all.
    Unset: none."""


class PublishSettings(Endpoints):
    """Destinations outside the cluster."""

    allowed_destinations: (
        Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=512)]], Field(max_length=256)] | None
    ) = None
    """Prefixes of the `hf://`, `s3://` and `oci://` destinations that jobs may name; `oci://` alone allows every registry.
    Unset: none."""
    plain_http_registries: Annotated[list[Annotated[str, StringConstraints(max_length=255)]], Field(max_length=32)] = Field(
        default_factory=list
    )
    """Registries, as `host:port`, that are reached without TLS."""
    signing_key_secret: SecretReference | None = None
    """Secret in the job's namespace with `signing.key`, a PEM file with a private key of the curve P-256. With it the publishing
    pod signs SHA256SUMS. Unset: results are not signed."""


class KueueSettings(ApiModel):
    """Kueue settings of training Jobs besides the queue. They need permissions that the chart grants with `kueue`."""

    queue_during_preflight: bool = False
    """Whether training takes its place in the queue when preflight begins, and is admitted once preflight has passed. If false,
    it joins the queue after preflight. Needs Kueue 0.19, or 0.17 with its feature gate AdmissionGatedBy: a Kueue without it
    admits training at once."""


class ElasticSettings(ApiModel):
    """Waiting times of elastic jobs (`spec.parallelism.elastic`). They are frozen with a job's plan."""

    shrink_after_seconds: Annotated[int, Field(ge=10, le=86_400)] = 300
    """Seconds for which a gang waits for nodes for all of its pods before it starts on those that it has, if they suffice. A
    gang that its queue does not admit in this time asks for fewer nodes: half as many, or as many as it had before."""
    grow_after_seconds: Annotated[int, Field(ge=10, le=604_800)] = 1800
    """Seconds for which a smaller gang trains before it asks for all nodes again, after its next checkpoint. The time doubles
    after each failure, to at most eight times this. A gang in a queue gives back its nodes to ask for more, so it asks only if no
    other job waits in its ClusterQueue, which the operator must be able to read (`kueue.readQueues` of its chart)."""


Cidr = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=64)]
PortNumber = Annotated[int, Field(ge=1, le=65_535)]


class NetworkDestination(ApiModel):
    """Addresses inside private ranges that fetching and publishing may reach, such as a mirror of the Hub in the cluster."""

    cidr: Cidr
    """Block of addresses."""
    ports: Annotated[list[PortNumber], Field(max_length=16)] = Field(default_factory=list)
    """TCP ports. Empty: all."""


class DnsServers(ApiModel):
    """The servers that resolve names for all pods of a run. Ranks find each other by name."""

    namespaces: Annotated[list[ObjectName], Field(max_length=16)] = Field(default_factory=lambda: ["kube-system"])
    """Namespaces in which the DNS servers run."""
    cidrs: Annotated[list[Cidr], Field(max_length=16)] = Field(default_factory=lambda: ["169.254.20.10/32"])
    """Addresses of DNS servers. The default is that of NodeLocal DNSCache."""
    ports: Annotated[list[PortNumber], Field(min_length=1, max_length=16)] = Field(default_factory=lambda: [53])
    """UDP and TCP ports on which the server pods listen; 5353 on OpenShift."""


class NetworkSettings(ApiModel):
    """NetworkPolicies of each run. They have an effect only if the cluster's network enforces policies."""

    isolate: bool = True
    """Whether each run gets policies: its pods may reach only each other; fetch and publish may also reach public addresses."""
    metrics_namespaces: Annotated[list[ObjectName], Field(max_length=16)] = Field(default_factory=list)
    """Namespaces, besides the operator's, whose pods may read the metrics of rank 0, such as that of Prometheus."""
    destinations: Annotated[list[NetworkDestination], Field(max_length=64)] = Field(default_factory=list)
    """Destinations that fetch and publish may reach besides public addresses."""
    dns: DnsServers = DnsServers.model_construct()
    """DNS servers that the pods may query. If both lists are empty, the pods may send to these ports of any address."""


class JobLimits(ApiModel):
    """The most that one job may request. Unset: no limit."""

    nodes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Maximum number of pods of the gang."""
    gpus: Annotated[int, Field(ge=1, le=262_144)] | None = None
    """Maximum number of devices of all pods together."""
    storage: Quantity | None = None
    """Maximum size of a workspace claim created from a template."""
    active_deadline_seconds: Annotated[int, Field(ge=10, le=31_536_000)] | None = None
    """Maximum of run.activeDeadlineSeconds. If set, jobs must specify it."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] | None = None
    """Maximum of run.maxRestarts."""


NamespacePattern = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(-?\*)?$|^\*$", max_length=64)]


class FineTuneProfileSpec(ApiModel):
    """Images, resources and limits of every job that names this profile."""

    trainer_image: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """Trainer image, by digest in production."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""
    resources: Resources = Resources.model_construct()
    """Resources by role."""
    scratch_storage: Quantity = "8Gi"
    """Size limit of /tmp in each pod, which is on the node's disk. Pods outside queues request this much ephemeral storage,
    unless the extraResources of their role set it."""
    gpu: GpuResource | None = None
    """Accelerator of training pods. Unset: training runs on the CPU."""
    storage_class_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Storage class of workspace claims created from a template. Unset: the cluster's default."""
    service_account_name: Annotated[str, StringConstraints(max_length=253)] = "default"
    """ServiceAccount of the pods; its token is never mounted."""
    run_as_user: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = None
    """User ID of the pods. Unset: the image's, or the one that the platform assigns."""
    fs_group: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Group that owns mounted volumes. Unset: the platform's."""
    supplemental_groups: Annotated[list[Annotated[int, Field(ge=1, le=2_147_483_647)]], Field(max_length=32)] = Field(
        default_factory=list
    )
    """Further groups of the pods, such as those that own the files of a shared file system."""
    node_selector: NodeLabels | None = None
    """Node labels that training pods need, in addition to those of `pods.train.nodeSelector`."""
    pods: PodsByRole = PodsByRole.model_construct()
    """Where pods run and in which queues they wait, by role: tolerations, affinity, scheduler, priority, queue and more."""
    elastic: ElasticSettings = ElasticSettings.model_construct()
    """How long elastic jobs wait before they start on fewer nodes, and before they ask for all nodes again."""
    kueue: KueueSettings = KueueSettings.model_construct()
    """Kueue settings of training Jobs besides the queue."""
    image_pull_secrets: Annotated[list[SecretReference], Field(max_length=8)] | None = None
    """Secrets of the job's namespace with which the trainer image is pulled."""
    allowed_namespaces: Annotated[list[NamespacePattern], Field(max_length=256)] | None = None
    """Namespaces whose jobs may name this profile; `team-*` matches all that begin with `team-`. Unset: all; empty: none."""
    namespace_selector: NamespaceSelector | None = None
    """Labels that a namespace needs, besides passing `allowedNamespaces`, for its jobs to name this profile. Unset: none."""
    limits: JobLimits = JobLimits.model_construct()
    """The most that one job may request."""
    max_active_jobs: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Maximum number of active jobs in one namespace; the others wait, and the oldest starts first. Unset: no limit."""
    force_delete_pods_of_lost_nodes: bool = False
    """Whether pods on a node that stopped answering are deleted by force, so that the next attempt can start. Set it only if the
    platform prevents such a node from writing to the workspace: the old rank may still be running there."""
    fetch: FetchSettings = FetchSettings.model_construct()
    """Services and rules for `hf://` and `s3://` sources outside the cluster."""
    publish: PublishSettings = PublishSettings.model_construct()
    """Services and rules for `hf://`, `s3://` and `oci://` destinations outside the cluster."""
    network: NetworkSettings = NetworkSettings.model_construct()
    """Network access to and from the pods of a run."""
    ca_bundle: CaBundle | None = None
    """Certificate authorities that fetch and publish trust instead of the image's public ones. List all that the Hub, the object
    store, the registry and a proxy need. Unset: those of the image."""
    allow_remote_code: bool = False
    """Whether jobs may set model.allowRemoteCode."""
    require_rehearsal: bool = False
    """Whether a job trains only after its preflight has rehearsed it to the end. `preflight.rehearsal: Skip` is refused, and so
    is a job whose rehearsal could not be completed. Verdicts of earlier rehearsals on the workspace's claim are not used."""

    def allows_namespace(self, namespace: str) -> bool:
        """Whether `allowed_namespaces` lets jobs of this namespace name the profile."""
        return self.allowed_namespaces is None or any(
            namespace.startswith(name[:-1]) if name.endswith("*") else namespace == name for name in self.allowed_namespaces
        )

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, content: Any) -> Any:
        check_size(content, MAX_PROFILE_BYTES)
        return content

    @model_validator(mode="after")
    def _accelerators_are_counted_once(self) -> Self:
        taken = self.gpu.resource_name if self.gpu is not None else ""
        if taken in (self.pods.train.extra_resources or {}):
            raise ValueError(f"pods.train.extraResources: {taken!r} is set by gpu.resourceName; remove it here")
        return self


class FineTuneProfile(ApiModel):
    """A FineTuneProfile as written in a manifest; status is read separately."""

    api_version: Literal["finetune.dev/v1alpha1"]
    kind: Literal["FineTuneProfile"]
    metadata: ObjectMeta
    spec: FineTuneProfileSpec
    status: Annotated[dict[str, Any] | None, Field(exclude=True)] = None


def is_allowed(address: str, beginnings: Sequence[str]) -> bool:
    """Whether an address has one of the prefixes, by whole segments: hf://our-org is not a prefix of hf://our-organisation/model."""
    scheme, _, rest = address.partition("://")
    spellings = [rest.rstrip("/")]
    place = parse_destination(address)
    if isinstance(place, RegistryPath):
        # A prefix that names a repository allows all its tags.
        repository = f"{place.registry}/{place.repository}"
        spellings = [repository, f"{repository}:{place.tag}"]
    return any(_has_prefix(scheme, spelling, beginning) for beginning in beginnings for spelling in spellings)


def _has_prefix(scheme: str, rest: str, beginning: str) -> bool:
    wanted_scheme, separator, wanted_rest = beginning.partition("://")
    if not separator or wanted_scheme != scheme:
        return False
    wanted = [part for part in wanted_rest.split("/") if part]
    return rest.split("/")[: len(wanted)] == wanted

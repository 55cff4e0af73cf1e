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
    """A condition of a node that says that a GPU of it is broken."""

    type: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_./]{0,314}[A-Za-z0-9])?$")]
    """Its type, such as GpuXidError."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Its status when a GPU is broken."""


class GpuResource(ApiModel):
    """The accelerator of a training pod."""

    resource_name: Annotated[str, StringConstraints(max_length=253)] = "nvidia.com/gpu"
    """Extended resource; each pod asks for processesPerNode of it."""
    memory: Quantity = "80Gi"
    """Memory of one device."""
    product: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    """What its driver or the label nvidia.com/gpu.product calls it, such as NVIDIA-H100-80GB-HBM3: with it tokens per second are
    calculated. Unset: what the node selector of training pods says of that label."""
    price_per_hour: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?$")] | None = None
    """Price of one device for an hour, in a currency of the platform's choice, for the metric finetune_cost_total. It holds for
    jobs that start afterwards. Unset: no cost is counted."""
    fault_conditions: Annotated[list[NodeCondition], Field(max_length=32)] = Field(default_factory=list)
    """Conditions that an agent which watches GPUs writes on nodes. If a node gets one of them while a gang trains on it, and the
    gang then fails for no other known cause, that is DeviceFault and not counted. The operator needs the right to read nodes
    (`rbac.readNodes` of its chart). Not frozen with a plan: it holds for running jobs at once."""


class Resources(ApiModel):
    """Resources by role."""

    fetch: TransferResources = TransferResources.model_construct()
    """CPU pod that copies model and data to the workspace."""
    preflight: PreflightResources = PreflightResources.model_construct()
    """CPU pod that checks model, data and settings."""
    train: TrainResources = TrainResources.model_construct()
    """Training pod; GPUs come on top."""
    merge: MergeResources = MergeResources.model_construct()
    """CPU pod that merges and verifies."""
    publish: TransferResources = TransferResources.model_construct()
    """CPU pod that copies the results to a destination outside the cluster."""


class SecretReference(ApiModel):
    """A Secret by its name."""

    name: ObjectName
    """Secret."""


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
    """ConfigMap, such as trust-manager keeps in every namespace."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "ca.crt"
    """Key with the certificates in PEM."""


class FetchSettings(Endpoints):
    """Ways out of the cluster for what is read."""

    allowed_sources: (
        Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=512)]], Field(max_length=256)] | None
    ) = None
    """Beginnings of the `hf://` and `s3://` sources that jobs may name, such as `hf://our-org/`; `hf://` and `s3://` are all.
    Unset: none."""


class PublishSettings(Endpoints):
    """Ways out of the cluster for results."""

    allowed_destinations: (
        Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=512)]], Field(max_length=256)] | None
    ) = None
    """Beginnings of the `hf://`, `s3://` and `oci://` destinations that jobs may name; `oci://` alone is every registry.
    Unset: none."""
    plain_http_registries: Annotated[list[Annotated[str, StringConstraints(max_length=255)]], Field(max_length=32)] = Field(
        default_factory=list
    )
    """Registries, as `host:port`, that are spoken to without TLS."""
    signing_key_secret: SecretReference | None = None
    """Secret in the job's namespace with `signing.key`, a PEM file with a private key of the curve P-256. With it the publishing
    pod signs SHA256SUMS. Unset: results are not signed."""


class KueueSettings(ApiModel):
    """What the operator tells Kueue of training Jobs beyond their queue. It needs rights that the chart gives with `kueue`."""

    queue_during_preflight: bool = False
    """Whether training takes its place in the queue when preflight begins, and is admitted once preflight has passed. If not, it
    comes to the queue after preflight. Needs Kueue 0.19, or 0.17 with its feature gate AdmissionGatedBy: a Kueue without it
    admits training at once."""


class ElasticSettings(ApiModel):
    """How patient elastic jobs (`spec.parallelism.elastic`) are. Frozen with a job's plan."""

    shrink_after_seconds: Annotated[int, Field(ge=10, le=86_400)] = 300
    """How long a gang waits for nodes for all of its pods before it starts on those that it has got, if they are enough. A gang
    that its queue does not admit for so long asks the queue for fewer nodes: for half, or for those that it had before."""
    grow_after_seconds: Annotated[int, Field(ge=10, le=604_800)] = 1800
    """How long a smaller gang trains before all nodes are asked for again, after its next checkpoint. Twice as long after each
    time that they could not be had, up to eight times. A gang of a queue gives back what it has to ask for more. So it asks only
    if nobody else waits in its ClusterQueue, which the operator must be able to read (`kueue.readQueues` of its chart)."""


Cidr = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=64)]
PortNumber = Annotated[int, Field(ge=1, le=65_535)]


class NetworkDestination(ApiModel):
    """Addresses inside private ranges that fetching and publishing may reach, such as a mirror of the Hub in the cluster."""

    cidr: Cidr
    """Block of addresses."""
    ports: Annotated[list[PortNumber], Field(max_length=16)] = Field(default_factory=list)
    """TCP ports. Empty: all."""


class DnsServers(ApiModel):
    """Who answers the questions for names of all pods of a run. Ranks find each other by name."""

    namespaces: Annotated[list[ObjectName], Field(max_length=16)] = Field(default_factory=lambda: ["kube-system"])
    """Namespaces whose pods answer."""
    cidrs: Annotated[list[Cidr], Field(max_length=16)] = Field(default_factory=lambda: ["169.254.20.10/32"])
    """Addresses that answer. The default is that of NodeLocal DNSCache."""
    ports: Annotated[list[PortNumber], Field(min_length=1, max_length=16)] = Field(default_factory=lambda: [53])
    """UDP and TCP ports on which they listen themselves; 5353 on OpenShift."""


class NetworkSettings(ApiModel):
    """NetworkPolicies of each run. They hold where the cluster's network enforces policies."""

    isolate: bool = True
    """Whether each run gets policies: its pods talk among themselves alone, fetch and publish also to public addresses."""
    metrics_namespaces: Annotated[list[ObjectName], Field(max_length=16)] = Field(default_factory=list)
    """Namespaces, besides the operator's, whose pods may read the metrics of rank 0, such as that of Prometheus."""
    destinations: Annotated[list[NetworkDestination], Field(max_length=64)] = Field(default_factory=list)
    """What fetch and publish may reach besides public addresses."""
    dns: DnsServers = DnsServers.model_construct()
    """DNS servers that the pods may ask. If both lists are empty, the pods may send to the ports of any address."""


class JobLimits(ApiModel):
    """The most that one job may ask for. Unset: no limit."""

    nodes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Pods of the gang."""
    gpus: Annotated[int, Field(ge=1, le=262_144)] | None = None
    """Devices of all its pods together."""
    storage: Quantity | None = None
    """Workspace claim made from a template."""
    active_deadline_seconds: Annotated[int, Field(ge=10, le=31_536_000)] | None = None
    """Its run.activeDeadlineSeconds, which a job then has to set."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] | None = None
    """Its run.maxRestarts."""


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
    """Size limit of /tmp in each pod, which is on the node's disk. Pods that wait in no queue ask for as much ephemeral
    storage, unless the extraResources of their role say otherwise."""
    gpu: GpuResource | None = None
    """Accelerator of training pods. Unset: training runs on the CPU."""
    storage_class_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Storage class of workspace claims made from a template. Unset: the cluster's default."""
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
    """When elastic jobs take fewer nodes, and when they ask for more."""
    kueue: KueueSettings = KueueSettings.model_construct()
    """What Kueue is told of training Jobs beyond their queue."""
    image_pull_secrets: Annotated[list[SecretReference], Field(max_length=8)] | None = None
    """Secrets of the job's namespace with which the trainer image is pulled."""
    allowed_namespaces: Annotated[list[NamespacePattern], Field(max_length=256)] | None = None
    """Namespaces whose jobs may name this profile; `team-*` are all that begin with `team-`. Unset: all; empty: none."""
    namespace_selector: NamespaceSelector | None = None
    """Labels of the namespaces whose jobs may name this profile, of those that `allowedNamespaces` allows. Unset: all."""
    limits: JobLimits = JobLimits.model_construct()
    """The most that one job may ask for."""
    max_active_jobs: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """How many jobs of one namespace may be active at a time; the others wait, the oldest first. Unset: no limit."""
    force_delete_pods_of_lost_nodes: bool = False
    """Whether pods on a node that stopped answering are deleted by force, so that the next attempt can start. Only if the
    platform makes sure that such a node no longer writes to the workspace: the old rank may still run."""
    fetch: FetchSettings = FetchSettings.model_construct()
    """Ways out of the cluster for `hf://` and `s3://` sources."""
    publish: PublishSettings = PublishSettings.model_construct()
    """Ways out of the cluster for `hf://`, `s3://` and `oci://` destinations."""
    network: NetworkSettings = NetworkSettings.model_construct()
    """What the pods of a run may reach, and who may reach them."""
    ca_bundle: CaBundle | None = None
    """What fetch and publish trust when they speak TLS, in place of the public authorities of the image: all that the Hub, the
    object store, the registry and a proxy need. Unset: the image's."""
    allow_remote_code: bool = False
    """Whether jobs may set model.allowRemoteCode."""
    require_rehearsal: bool = False
    """Whether a job trains only after its preflight has rehearsed it to the end: `preflight.rehearsal: Skip` is refused, and a
    job whose rehearsal could not be done. Verdicts of earlier rehearsals on the workspace's claim are not used."""

    def allows_namespace(self, namespace: str) -> bool:
        """Whether jobs of this namespace may name the profile, by the name of the namespace."""
        return self.allowed_namespaces is None or any(
            namespace.startswith(one[:-1]) if one.endswith("*") else namespace == one for one in self.allowed_namespaces
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
    """A FineTuneProfile as written in a manifest; status is read apart."""

    api_version: Literal["finetune.dev/v1alpha1"]
    kind: Literal["FineTuneProfile"]
    metadata: ObjectMeta
    spec: FineTuneProfileSpec
    status: Annotated[dict[str, Any] | None, Field(exclude=True)] = None


def is_allowed(address: str, beginnings: Sequence[str]) -> bool:
    """Whether whole segments of `address` are those of one beginning: hf://our-org is not one of hf://our-organisation/model."""
    scheme, _, rest = address.partition("://")
    spellings = [rest.rstrip("/")]
    place = parse_destination(address)
    if isinstance(place, RegistryPath):
        # A repository stands for all its tags.
        repository = f"{place.registry}/{place.repository}"
        spellings = [repository, f"{repository}:{place.tag}"]
    return any(_has_prefix(scheme, spelling, beginning) for beginning in beginnings for spelling in spellings)


def _has_prefix(scheme: str, rest: str, beginning: str) -> bool:
    wanted_scheme, separator, wanted_rest = beginning.partition("://")
    if not separator or wanted_scheme != scheme:
        return False
    wanted = [part for part in wanted_rest.split("/") if part]
    return rest.split("/")[: len(wanted)] == wanted

"""What the operator reads of a frozen plan: as much as it builds children from, and nothing else.

The plan may come from any release, an earlier one or, after a rollback, a later one. Each class here is the base of the one
that a container reads, so that one field has one definition. What only a container needs (methods, optimizers, sharding) is left
out, so that a value that this release has never heard of cannot stop a run. `PlacementModel` says what a field that a release
adds to the placement needs.
"""

from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from finetune_job.api.base import ClaimPath
from finetune_job.api.profile import CaBundle, ElasticSettings, Resources
from finetune_job.names import Role

_TRAINING_DATA, _HELD_OUT_DATA = "spec.data.source", "spec.data.validation.source"


class PlanModel(BaseModel):
    """Immutable; unknown fields are errors for a reader of the whole plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    REMOVED: ClassVar[frozenset[str]] = frozenset()
    """Fields that earlier releases wrote into plans and that no longer mean anything; a reader ignores them."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, content: Any) -> Any:
        if not cls.REMOVED or not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if name not in cls.REMOVED}


class SecretKey(PlanModel):
    """A key of a Secret; its value is in no plan."""

    name: str
    key: str


class FetchItem(PlanModel):
    """One thing to copy to the workspace."""

    source: str
    """`hf://` or `s3://`."""
    revision: str | None
    """Commit, of `hf://` sources."""
    target: ClaimPath


class FetchPlan(PlanModel):
    """What is copied before anything is looked at."""

    items: tuple[FetchItem, ...]
    hub_endpoint: str | None
    """None: the library's own."""
    s3_endpoint: str | None
    s3_region: str | None
    hub_token: SecretKey | None
    s3_secret: str | None


class PublishPlan(PlanModel):
    """Where the results go from the workspace."""

    destination: str
    """`hf://`, `s3://` or `oci://`; a registry with its tag."""
    secret: str | None
    """Secret of the destination; `names` says which keys it has for each kind."""
    private: bool
    hub_endpoint: str | None
    """None: the library's own."""
    s3_endpoint: str | None
    s3_region: str | None
    plain_http_registries: tuple[str, ...]


class PlacementModel(PlanModel):
    """A part of the placement, which concerns the operator: a container ignores what it does not know here.

    A field that a release adds is not written while it has the value that means what the releases before it did, so that a
    trainer image of such a release reads every plan that asks for nothing new.
    """

    model_config = ConfigDict(extra="ignore")
    ADDED: ClassVar[frozenset[str]] = frozenset()
    """Fields that the first release with this class did not have."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        for name, default in _added_defaults(type(self)).items():
            if name in content and getattr(self, name) == default:
                del content[name]
        return content


@cache
def _added_defaults(model: type[PlacementModel]) -> dict[str, Any]:
    """What added fields mean when they are not written. Never changed, only compared with."""
    return {name: model.model_fields[name].get_default(call_default_factory=True) for name in model.ADDED}


class PodPlacement(PlacementModel):
    """How the pods of one role are placed; lists and objects in Kubernetes' own form, as they go into a PodSpec."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] = Field(default_factory=dict)
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    runtime_class_name: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    extra_resources: dict[str, str] = Field(default_factory=dict)
    resource_claims: tuple[dict[str, Any], ...] = ()
    env: tuple[dict[str, str], ...] = ()
    queue_name: str | None = None
    """Kueue's LocalQueue; None: the Jobs of this role wait in no queue."""
    queue_priority_class_name: str | None = None
    """Kueue's WorkloadPriorityClass."""


PodPlacement.ADDED = frozenset(PodPlacement.model_fields)


class PlacedPods(PlacementModel):
    """Pods by role."""

    ADDED = frozenset(map(str, Role))
    fetch: PodPlacement = PodPlacement.model_construct()
    preflight: PodPlacement = PodPlacement.model_construct()
    train: PodPlacement = PodPlacement.model_construct()
    merge: PodPlacement = PodPlacement.model_construct()
    publish: PodPlacement = PodPlacement.model_construct()

    def of(self, role: Role) -> PodPlacement:
        """Of one role."""
        found: PodPlacement = getattr(self, str(role))
        return found


class Placement(PlacementModel):
    """What the profile decided at the start; later changes of the profile do not touch a run that has started."""

    ADDED = frozenset(
        {
            *("pods", "image_pull_secrets", "queue_during_preflight", "requires_rehearsal"),
            *("scratch_storage", "signing_key_secret", "supplemental_groups", "ca_bundle", "elastic", "gpu_product"),
            "restart_in_pod",
        }
    )
    profile: str
    trainer_image: str
    image_pull_policy: str
    resources: Resources
    gpu_resource_name: str | None
    gpu_memory: str | None = None
    """Memory of one device, as a quantity; None: training runs on the CPU."""
    gpu_product: str | None = None
    """Name of the device. None: as the node selector says, or nobody has."""
    service_account_name: str
    run_as_user: int | None
    fs_group: int | None
    supplemental_groups: list[int] = Field(default_factory=list)
    node_selector: dict[str, str]
    """Node labels that training pods need, in addition to those of `pods.train`."""
    pods: PlacedPods = PlacedPods.model_construct()
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with which the trainer image is pulled."""
    queue_during_preflight: bool = False
    """Whether the training Job waits in its queue from the beginning of preflight on, gated until it has passed."""
    requires_rehearsal: bool = False
    """Whether preflight has to rehearse the job to the end."""
    scratch_storage: str | None = None
    """Size limit of /tmp. None: frozen by a release that knew none."""
    signing_key_secret: str | None = None
    """Secret with the key that signs what is published. None: nothing is signed."""
    ca_bundle: CaBundle | None = None
    """What fetch and publish trust. None: the authorities of the image."""
    elastic: ElasticSettings | None = None
    """When the gang takes fewer nodes and asks for more. None: it always has all of them."""
    restart_in_pod: bool = False
    """Whether a gang of one pod may run its next attempt in that pod. False: frozen by a release whose trainer did not wait there
    for its number."""


class PlacedModel(PlanModel):
    """Base model."""

    location: ClaimPath
    """Where it is: on the user's claim, or where fetch puts it on the workspace."""


class PlacedRecords(PlanModel):
    """A file or directory of records."""

    location: ClaimPath
    """Where it is: on the user's claim, or where fetch puts it on the workspace."""
    field: str
    """Where the user named it, such as `spec.data.datasets[0].source`, for messages."""


class PlacedData(PlanModel):
    """Training and held-out records."""

    train: tuple[PlacedRecords, ...]
    validation: PlacedRecords | None

    @model_validator(mode="before")
    @classmethod
    def _from_single_source(cls, content: Any) -> Any:
        """The first releases knew one source for training, and wrote its place alone."""
        if not isinstance(content, dict) or not isinstance(content.get("train"), dict):
            return content
        held_out = content.get("validation")
        return content | {
            "train": [_source_entry(content["train"], _TRAINING_DATA)],
            "validation": None if held_out is None else _source_entry(held_out, _HELD_OUT_DATA),
        }


def _source_entry(location: dict[str, Any], field: str) -> dict[str, Any]:
    return {"location": location, "source": claim_source(location), "field": field, "weight": 1.0}


def claim_source(location: dict[str, Any]) -> str:
    """A path on a claim as users write it."""
    return f"pvc://{location.get('claim', '')}/{location.get('path', '')}"


class TrainedParts(PlanModel):
    """Fine-tuning method: what is trained."""

    lora: Any = None
    adapter: Any = None

    @property
    def trains_adapter(self) -> bool:
        """Whether something is trained next to a frozen base."""
        return self.lora is not None or self.adapter is not None


class Ranks(PlanModel):
    """Pods and ranks of the gang."""

    nodes: int
    processes_per_node: int
    min_nodes: int | None = None
    """The fewest nodes of an elastic gang; None: it always has all of them."""

    @property
    def world_size(self) -> int:
        """Number of ranks; of an elastic gang of the largest size, which is also the number of its virtual ranks."""
        return self.nodes * self.processes_per_node

    @property
    def smallest_world_size(self) -> int:
        """Number of ranks on the fewest nodes."""
        return (self.min_nodes or self.nodes) * self.processes_per_node


class MergeSwitch(PlanModel):
    """Merge and verification."""

    enabled: bool


class LaunchPlan(PlanModel):
    """The part of a RunPlan that decides which children a job has."""

    version: Literal[1] = 1
    model: PlacedModel
    data: PlacedData
    fetch: FetchPlan | None = None
    """None: everything is on claims."""
    method: TrainedParts
    parallelism: Ranks
    merge: MergeSwitch
    workspace: ClaimPath
    """Directory of this job on the workspace claim."""
    output: ClaimPath
    """Directory of the results: on the user's claim, or on the workspace, from where they are published."""
    keeps_adapter: bool = True
    """Whether the adapter is among the results next to a merged model."""
    publish: PublishPlan | None = None
    """None: the results are already where they belong."""
    placement: Placement | None
    """None in local mode."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is among the results."""
        return self.method.trains_adapter and self.keeps_adapter

    @property
    def has_merged(self) -> bool:
        """Whether a whole model is among the results: merged, or trained whole."""
        return self.merge.enabled or not self.method.trains_adapter


def read_launch_plan(text: str) -> LaunchPlan:
    """The operator's part of a plan of any release. Raises pydantic.ValidationError."""
    return LaunchPlan.model_validate_json(text, extra="ignore")

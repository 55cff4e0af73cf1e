"""The part of a frozen plan that the operator reads: only the fields that it needs to build children.

The plan may come from any release: an earlier one or, after a rollback, a later one. Each class here is the base of the class
that a container reads, so each field is defined only once. Fields that only a container needs (methods, optimizers, sharding) are
left out, so that a value unknown to this release cannot stop a run. `PlacementModel` explains how releases add fields to the
placement.
"""

from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from finetune_job.api.base import ClaimPath
from finetune_job.api.profile import CaBundle, ElasticSettings, Resources
from finetune_job.names import Role

_TRAINING_DATA, _HELD_OUT_DATA = "spec.data.source", "spec.data.validation.source"


class PlanModel(BaseModel):
    """The base class of all parts of a plan. They are immutable, and readers of the whole plan reject unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    REMOVED: ClassVar[frozenset[str]] = frozenset()
    """Obsolete fields that earlier releases wrote into plans; they are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, content: Any) -> Any:
        if not cls.REMOVED or not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if name not in cls.REMOVED}


class SecretKey(PlanModel):
    """A reference to a key of a Secret; plans never contain the value."""

    name: str
    key: str


class FetchItem(PlanModel):
    """One source to copy to the workspace."""

    source: str
    """Address that begins with `hf://` or `s3://`."""
    revision: str | None
    """Commit of an `hf://` source."""
    target: ClaimPath


class FetchPlan(PlanModel):
    """The sources that are copied to the workspace before they are checked."""

    items: tuple[FetchItem, ...]
    hub_endpoint: str | None
    """Address of the Hub; None for the library's default."""
    s3_endpoint: str | None
    s3_region: str | None
    hub_token: SecretKey | None
    s3_secret: str | None


class PublishPlan(PlanModel):
    """The destination to which results are copied from the workspace."""

    destination: str
    """Address that begins with `hf://`, `s3://` or `oci://`; in a registry it includes the tag."""
    secret: str | None
    """Secret with the destination's credentials; names.py lists its keys for each kind of destination."""
    private: bool
    hub_endpoint: str | None
    """Address of the Hub; None for the library's default."""
    s3_endpoint: str | None
    s3_region: str | None
    plain_http_registries: tuple[str, ...]


class PlacementModel(PlanModel):
    """A part of the placement. Only the operator uses it, so a container ignores unknown fields here.

    A field that a later release adds is written only if its value differs from the default, which stands for the earlier
    behaviour. So trainer images of earlier releases can read every plan that uses no new feature.
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
    """Return the defaults of the added fields. Callers only compare with them, and must not modify them."""
    return {name: model.model_fields[name].get_default(call_default_factory=True) for name in model.ADDED}


class PodPlacement(PlacementModel):
    """The placement of one role's pods; lists and objects have the same form as in a PodSpec."""

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
    """Kueue's LocalQueue; None if the Jobs of this role wait in no queue."""
    queue_priority_class_name: str | None = None
    """Kueue's WorkloadPriorityClass."""


PodPlacement.ADDED = frozenset(PodPlacement.model_fields)


class PlacedPods(PlacementModel):
    """The placement of pods by role."""

    ADDED = frozenset(map(str, Role))
    fetch: PodPlacement = PodPlacement.model_construct()
    preflight: PodPlacement = PodPlacement.model_construct()
    train: PodPlacement = PodPlacement.model_construct()
    merge: PodPlacement = PodPlacement.model_construct()
    publish: PodPlacement = PodPlacement.model_construct()

    def of(self, role: Role) -> PodPlacement:
        """Return the placement of one role's pods."""
        placement: PodPlacement = getattr(self, str(role))
        return placement


class Placement(PlacementModel):
    """The settings of the profile when the job started; later changes to the profile do not affect the job."""

    ADDED = frozenset(
        {
            *("pods", "image_pull_secrets", "queue_during_preflight", "requires_rehearsal"),
            *("scratch_storage", "signing_key_secret", "supplemental_groups", "ca_bundle", "elastic", "gpu_product"),
            "restarts_in_pod",
        }
    )
    profile: str
    trainer_image: str
    image_pull_policy: str
    resources: Resources
    gpu_resource_name: str | None
    gpu_memory: str | None = None
    """Memory of one device, as a quantity; None if training runs on the CPU."""
    gpu_product: str | None = None
    """Product name of the device; None if only the node selector names it, or nothing does."""
    service_account_name: str
    run_as_user: int | None
    fs_group: int | None
    supplemental_groups: list[int] = Field(default_factory=list)
    node_selector: dict[str, str]
    """Node labels that training pods require, in addition to the node selector of `pods.train`."""
    pods: PlacedPods = PlacedPods.model_construct()
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with which the trainer image is pulled."""
    queue_during_preflight: bool = False
    """Whether the training Job already waits in its queue during preflight, with a gate that is removed once preflight passes."""
    requires_rehearsal: bool = False
    """Whether preflight has to rehearse the job to the end."""
    scratch_storage: str | None = None
    """Size limit of /tmp; None in plans of releases that did not have this field."""
    signing_key_secret: str | None = None
    """Secret with the key that signs published results; None if they are not signed."""
    ca_bundle: CaBundle | None = None
    """Certificate authorities that fetch and publish trust; None for the image's own."""
    elastic: ElasticSettings | None = None
    """How long a gang waits before it runs on fewer nodes or asks for more; None if its size is fixed."""
    restarts_in_pod: int = 0
    """Maximum number of rank restarts within the pod of a one-pod gang; 0 in plans of releases without this feature."""


class PlacedModel(PlanModel):
    """The base model and its location."""

    location: ClaimPath
    """Location on the user's claim, or on the workspace if it is fetched."""


class PlacedRecords(PlanModel):
    """A file or directory of records."""

    location: ClaimPath
    """Location on the user's claim, or on the workspace if it is fetched."""
    field: str
    """Field in which the user named the records, such as `spec.data.datasets[0].source`, for messages."""


class PlacedData(PlanModel):
    """Training and held-out records."""

    train: tuple[PlacedRecords, ...]
    validation: PlacedRecords | None

    @model_validator(mode="before")
    @classmethod
    def _from_single_source(cls, content: Any) -> Any:
        """Accept plans of the first releases, which had a single training source and stored only its location."""
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
    """Return a location on a claim in the form that users write."""
    return f"pvc://{location.get('claim', '')}/{location.get('path', '')}"


class TrainedParts(PlanModel):
    """The fine-tuning method, which determines what is trained."""

    lora: Any = None
    adapter: Any = None

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained on a frozen base."""
        return self.lora is not None or self.adapter is not None


class Ranks(PlanModel):
    """Pods and ranks of the gang."""

    nodes: int
    processes_per_node: int
    min_nodes: int | None = None
    """Minimum number of nodes of an elastic gang; None if the gang's size is fixed."""

    @property
    def world_size(self) -> int:
        """Number of ranks. For an elastic gang, this is its maximum, which is also the number of virtual ranks."""
        return self.nodes * self.processes_per_node

    @property
    def smallest_world_size(self) -> int:
        """Number of ranks on the minimum number of nodes."""
        return (self.min_nodes or self.nodes) * self.processes_per_node


class MergeSwitch(PlanModel):
    """Whether the adapter is merged and the result verified."""

    enabled: bool


class LaunchPlan(PlanModel):
    """The part of a RunPlan that determines which children a job has."""

    version: Literal[1] = 1
    model: PlacedModel
    data: PlacedData
    fetch: FetchPlan | None = None
    """The sources to fetch; None if all sources are on claims."""
    method: TrainedParts
    parallelism: Ranks
    merge: MergeSwitch
    workspace: ClaimPath
    """Directory of this job on the workspace claim."""
    output: ClaimPath
    """Directory of the results: on the user's claim, or on the workspace, from which they are then published."""
    keeps_adapter: bool = True
    """Whether the results include the adapter even if there is a merged model."""
    publish: PublishPlan | None = None
    """The destination outside the cluster; None if the results stay on a claim."""
    placement: Placement | None
    """The settings of the profile when the job started; None in local mode."""

    @property
    def has_adapter(self) -> bool:
        """Whether the results include an adapter."""
        return self.method.trains_adapter and self.keeps_adapter

    @property
    def has_merged(self) -> bool:
        """Whether the results include a whole model, either merged or fully fine-tuned."""
        return self.merge.enabled or not self.method.trains_adapter


def read_launch_plan(text: str) -> LaunchPlan:
    """Read the operator's part of a plan from any release. Raises pydantic.ValidationError."""
    return LaunchPlan.model_validate_json(text, extra="ignore")

"""The frozen contract between operator, command line and trainer: every value resolved, none left to choose.

Numbers that the spec writes as strings are floats here, because this is where they are used; JSON written by Python reads back
to the same float. What only the model itself can tell (the layer classes to wrap) stays None and is resolved by preflight into
its report.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from finetune_job.api.base import ClaimPath, Dtype
from finetune_job.api.data import DataFormat, LossOn
from finetune_job.api.method import LoraBias, LoraInit, MethodType, QuantStorage, QuantType
from finetune_job.api.model import Attention
from finetune_job.api.output import MergeBase
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.api.profile import Resources
from finetune_job.api.training import ActivationCheckpointing, OptimizerName, Precision, Scheduler


class PlanModel(BaseModel):
    """Immutable; unknown fields are errors, because a container must not run a plan that it does not fully understand."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class JobIdentity(PlanModel):
    """Which job this plan belongs to."""

    namespace: str
    name: str
    uid: str


class ModelPlan(PlanModel):
    """Base model."""

    location: ClaimPath
    """Where it lies: on the user's claim, or where fetch puts it on the workspace."""
    name: str
    """What adapter_config.json calls it: `<org>/<name>` of the Hub, or the source as the user wrote it."""
    revision: str | None
    dtype: Dtype | None
    """None: as stored."""
    attention: Attention
    allow_remote_code: bool


class DatasetPlan(PlanModel):
    """A file or directory of records."""

    location: ClaimPath
    """Where it lies: on the user's claim, or where fetch puts it on the workspace."""
    source: str
    """As the user wrote it, for messages."""
    field: str
    """Where the user named it, such as `spec.data.datasets[0].source`, for messages."""
    weight: float
    """How often each record occurs in one pass."""


class DataPlan(PlanModel):
    """Records and their tokenisation."""

    train: tuple[DatasetPlan, ...]
    validation: DatasetPlan | None
    format: DataFormat
    chat_template: str | None
    """None: the tokenizer's."""
    max_sequence_length: int
    packing: bool
    loss_on: LossOn


class LoraPlan(PlanModel):
    """PEFT's LoraConfig."""

    r: int
    lora_alpha: int
    lora_dropout: float
    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...]
    exclude_modules: tuple[str, ...]
    layers_to_transform: tuple[int, ...] | None
    """None: all."""
    init_lora_weights: LoraInit
    modules_to_save: tuple[str, ...]
    trainable_token_indices: tuple[int, ...]
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, int]
    lora_plus_ratio: float | None
    """None: one learning rate for all."""
    use_rslora: bool
    use_dora: bool
    bias: LoraBias
    autocast_adapter_dtype: bool


class AdapterPlan(PlanModel):
    """PEFT's configuration of a method other than LoRA's family."""

    settings: dict[str, Any]
    """By PEFT's own field names in camelCase, as the user wrote them."""
    autocast_adapter_dtype: bool


class QuantizationPlan(PlanModel):
    """transformers' BitsAndBytesConfig; None: the model's element type."""

    bits: int
    quant_type: QuantType
    double_quant: bool
    compute_dtype: Dtype | None
    quant_storage: QuantStorage | None


class MethodPlan(PlanModel):
    """Fine-tuning method. `lora` is set for LoRA, QLoRA and DoRA, `adapter` for the other methods of PEFT, neither for Full."""

    type: MethodType
    lora: LoraPlan | None
    adapter: AdapterPlan | None
    quantization: QuantizationPlan | None
    """Set for QLoRA alone."""

    @property
    def trains_adapter(self) -> bool:
        """Whether something beside a frozen base is trained."""
        return self.lora is not None or self.adapter is not None

    @property
    def autocast_adapter_dtype(self) -> bool:
        """Whether adapters are held in float32 beside a base of 16 bits."""
        held = self.lora or self.adapter
        return held is not None and held.autocast_adapter_dtype

    @property
    def trains_parts_of_the_base(self) -> bool:
        """Whether whole modules or biases are trained, which compute among the base's other parts as those do."""
        if self.lora is not None:
            return bool(self.lora.modules_to_save) or self.lora.bias is not LoraBias.NONE
        if self.adapter is None:
            return False
        settings = self.adapter.settings
        return (
            self.type is MethodType.LN_TUNING
            or bool(settings.get("modulesToSave"))
            or settings.get("bias", LoraBias.NONE.value) != LoraBias.NONE.value
        )


class TrainingPlan(PlanModel):
    """Optimisation."""

    epochs: int | None
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    """globalBatchSize = microBatchSize x ranks x this."""
    optimizer: OptimizerName
    adam_betas: tuple[float, float]
    adam_epsilon: float
    momentum: float
    learning_rate: float
    scheduler: Scheduler
    warmup_ratio: float
    min_learning_rate_ratio: float
    decay_ratio: float
    weight_decay: float
    max_grad_norm: float
    """0: no clipping."""
    precision: Precision | None
    """None: fp32 for a float32 model, else bf16."""
    activation_checkpointing: ActivationCheckpointing
    compile: bool
    step_timeout_seconds: int
    trackers: tuple[str, ...]
    seed: int


class FsdpPlan(PlanModel):
    """Sharding. Version-1 fields are None under version 2 and the other way round."""

    version: int
    auto_wrap_policy: AutoWrapPolicy
    transformer_layer_cls_to_wrap: tuple[str, ...] | None
    """None: the model's own layer classes, found by preflight and recorded in its report."""
    min_num_params: int | None
    peft_wrap_policy: bool | None
    use_orig_params: bool | None
    sync_module_states: bool | None
    reshard_after_forward: bool | None
    offload_params: bool
    param_dtype: Dtype | None
    reduce_dtype: Dtype | None


class ParallelismPlan(PlanModel):
    """Ranks."""

    nodes: int
    processes_per_node: int
    fsdp: FsdpPlan

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.processes_per_node


class CheckpointPlan(PlanModel):
    """Checkpoints."""

    every_steps: int
    every_seconds: int | None
    asynchronous: bool
    keep: int


class EarlyStoppingPlan(PlanModel):
    """End of a run that no longer gets better."""

    patience: int
    min_delta: float


class EvaluationPlan(PlanModel):
    """Held-out loss."""

    every_steps: int | None
    """None: only before the first step and after the last."""
    early_stopping: EarlyStoppingPlan | None
    load_best_model_at_end: bool


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
    """Secret whose keys credentials.py names for this kind of destination."""
    private: bool
    hub_endpoint: str | None
    """None: the library's own."""
    s3_endpoint: str | None
    s3_region: str | None
    plain_http_registries: tuple[str, ...]


class MergePlanSettings(PlanModel):
    """Merge and verification."""

    enabled: bool
    base: MergeBase
    dtype: Dtype | None
    max_shard_bytes: int
    num_prompts: int
    max_kl_divergence: float | None
    min_top1_agreement: float | None


class Placement(PlanModel):
    """What the profile decided at the start; later changes of the profile do not touch a run that has started."""

    profile: str
    trainer_image: str
    image_pull_policy: str
    resources: Resources
    gpu_resource_name: str | None
    gpu_memory: str | None
    """Memory of one device, as a quantity; None: training runs on the CPU."""
    service_account_name: str
    run_as_user: int | None
    fs_group: int | None
    node_selector: dict[str, str]


class Choice(PlanModel):
    """A value that the user left open and the plan fixed."""

    field: str
    value: Any
    reason: str


class RunPlan(PlanModel):
    """Everything a container needs to know."""

    version: Literal[1] = 1
    job: JobIdentity
    model: ModelPlan
    data: DataPlan
    fetch: FetchPlan | None
    """None: everything lies on claims."""
    method: MethodPlan
    training: TrainingPlan
    parallelism: ParallelismPlan
    checkpoint: CheckpointPlan
    evaluation: EvaluationPlan
    merge: MergePlanSettings
    workspace: ClaimPath
    """Directory of this job on the workspace claim."""
    output: ClaimPath
    """Directory of the results: on the user's claim, or on the workspace, from where they are published."""
    keeps_adapter: bool
    """Whether the adapter is among the results beside a merged model."""
    publish: PublishPlan | None
    """None: the results lie where they belong."""
    rehearses: bool
    """Whether preflight tries the job on a small twin of the model."""
    placement: Placement | None
    """None in local mode."""
    choices: tuple[Choice, ...]

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is among the results."""
        return self.method.trains_adapter and self.keeps_adapter

    @property
    def has_merged(self) -> bool:
        """Whether a whole model is among the results: merged, or trained whole."""
        return self.merge.enabled or not self.method.trains_adapter

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
from finetune_job.api.method import LoraBias, MethodType, QuantStorage, QuantType
from finetune_job.api.model import Attention
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.api.profile import Resources
from finetune_job.api.training import ActivationCheckpointing, Precision, Scheduler


class PlanModel(BaseModel):
    """Immutable; unknown fields are errors, because a container must not run a plan that it does not fully understand."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class JobIdentity(PlanModel):
    """Which job this plan belongs to."""

    namespace: str
    name: str
    uid: str


class ModelPlan(PlanModel):
    """Base model."""

    location: ClaimPath
    dtype: Dtype | None
    """None: as stored."""
    attention: Attention
    allow_remote_code: bool


class DataPlan(PlanModel):
    """Records and their tokenisation."""

    train: ClaimPath
    validation: ClaimPath | None
    format: DataFormat
    max_sequence_length: int
    packing: bool
    loss_on: LossOn


class LoraPlan(PlanModel):
    """PEFT's LoraConfig."""

    r: int
    lora_alpha: int
    lora_dropout: float
    target_modules: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, int]
    use_rslora: bool
    use_dora: bool
    bias: LoraBias
    autocast_adapter_dtype: bool


class QuantizationPlan(PlanModel):
    """transformers' BitsAndBytesConfig; None: the model's element type."""

    bits: int
    quant_type: QuantType
    double_quant: bool
    compute_dtype: Dtype | None
    quant_storage: QuantStorage | None


class MethodPlan(PlanModel):
    """Fine-tuning method; `lora` is None for Full, `quantization` for all but QLoRA."""

    type: MethodType
    lora: LoraPlan | None
    quantization: QuantizationPlan | None


class TrainingPlan(PlanModel):
    """Optimisation."""

    epochs: int | None
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    """globalBatchSize = microBatchSize x ranks x this."""
    learning_rate: float
    scheduler: Scheduler
    warmup_ratio: float
    weight_decay: float
    max_grad_norm: float
    """0: no clipping."""
    precision: Precision | None
    """None: fp32 for a float32 model, else bf16."""
    activation_checkpointing: ActivationCheckpointing
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
    keep: int


class EvaluationPlan(PlanModel):
    """Held-out loss; None: only before the first step and after the last."""

    every_steps: int | None


class MergePlanSettings(PlanModel):
    """Merge and verification."""

    enabled: bool
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
    method: MethodPlan
    training: TrainingPlan
    parallelism: ParallelismPlan
    checkpoint: CheckpointPlan
    evaluation: EvaluationPlan
    merge: MergePlanSettings
    workspace: ClaimPath
    """Directory of this job on the workspace claim."""
    output: ClaimPath
    """Directory of the results."""
    placement: Placement | None
    """None in local mode."""
    choices: tuple[Choice, ...]

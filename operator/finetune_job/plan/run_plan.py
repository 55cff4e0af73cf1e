"""The frozen contract between operator, command line and trainer, with every value resolved or left to preflight.

Numbers that are strings in the spec are floats here, because programs compute with them; JSON written by Python reads back to the
same float. Values that depend on the model itself (the layer classes to wrap) stay None; preflight resolves them into its report.
A field's default is the behaviour of releases without that field; `resolve` sets every field, and choices.py records those that
the user left unset.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from finetune_job.api.base import ClaimPath
from finetune_job.api.enumerations import Dtype, MergeBase
from finetune_job.api.inputs import Attention, DataFormat, LossOn, OnInvalidRecord
from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.api.training import ActivationCheckpointing, GradientReduction, OptimizerName, Precision, Scheduler
from finetune_job.plan.launch_plan import (
    LaunchPlan,
    MergeSwitch,
    PlacedData,
    PlacedModel,
    PlacedRecords,
    PlanModel,
    Ranks,
    claim_source,
)
from finetune_job.plan.mapping import UNMAPPED, MappingPlan
from finetune_job.plan.method_plan import MethodPlan


class JobIdentity(PlanModel):
    """The job to which the plan belongs."""

    namespace: str
    name: str
    uid: str


class AddedTokenPlan(PlanModel):
    """A token that the job adds to the tokenizer."""

    content: str
    special: bool = False
    stop: bool = False

    def written(self) -> dict[str, Any]:
        """Return the token as a manifest contains it."""
        return self.model_dump(mode="json", exclude_defaults=True)


class ModelPlan(PlacedModel):
    """Base model."""

    name: str
    """Name on the Hub, `<org>/<name>`, if the manifest has one, otherwise the source as the user wrote it."""
    revision: str | None = None
    dtype: Dtype | None
    """Element type of the base; None for the stored one."""
    attention: Attention
    max_positions: int | None = None
    """Longest record in tokens, only for rotary positions; None for the length in config.json."""
    added_tokens: tuple[AddedTokenPlan, ...] = ()
    """Added tokens in the order of their ids."""
    allow_remote_code: bool

    @model_validator(mode="before")
    @classmethod
    def _named_by_location(cls, content: Any) -> Any:
        """Read plans of the first releases, which read only from claims and named the base by its location."""
        if isinstance(content, dict) and "name" not in content and isinstance(content.get("location"), dict):
            return content | {"name": claim_source(content["location"])}
        return content


class DatasetPlan(PlacedRecords):
    """A file or directory of records."""

    source: str
    """The source as the user wrote it, for messages."""
    weight: float
    """How often each record occurs in one pass."""
    splits: tuple[str, ...] = ()
    """Splits of a directory, of which the first that exists is read; empty for all files."""
    split_is_chosen: bool = False
    """Whether the user named the split, in which case a directory without it is refused."""


class DataPlan(PlacedData):
    """Records and their tokenisation."""

    train: tuple[DatasetPlan, ...]
    validation: DatasetPlan | None
    format: DataFormat
    mapping: MappingPlan = UNMAPPED
    chat_template: str | None = None
    """Chat template in Jinja, even if the user named a built-in one; None for the tokenizer's own."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    max_sequence_length: int
    packing: bool
    on_invalid_record: OnInvalidRecord = OnInvalidRecord.FAIL
    loss_on: LossOn


class TrainingPlan(PlanModel):
    """Optimisation."""

    REMOVED: ClassVar[frozenset[str]] = frozenset({"fp8"})
    epochs: int | None
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    """Micro-batches per optimizer step: globalBatchSize = microBatchSize x ranks x this number."""
    optimizer: OptimizerName = OptimizerName.ADAMW
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    momentum: float = 0.9
    learning_rate: float
    scheduler: Scheduler
    warmup_ratio: float
    min_learning_rate_ratio: float = 0.0
    decay_ratio: float = 0.2
    weight_decay: float
    max_grad_norm: float
    """Largest gradient norm; 0 for no clipping."""
    precision: Precision | None
    """Precision of the computation; None for the types in which base and adapters are held. On a GPU preflight may choose it."""
    activation_checkpointing: ActivationCheckpointing
    compile: bool = False
    reduction: GradientReduction = GradientReduction.FAST
    deterministic: bool = False
    step_timeout_seconds: int = 3600
    """Time limit of a step. The default is that of releases without a watchdog: the time-out of collectives, one hour."""
    trackers: tuple[str, ...] = ()
    start_from: ClaimPath | None = None
    """Checkpoint of another job with the initial values of the trained parameters; None for the method's own."""
    seed: int


class FsdpPlan(PlanModel):
    """Sharding. Fields of version 1 are None under version 2, and vice versa."""

    version: int
    auto_wrap_policy: AutoWrapPolicy
    transformer_layer_cls_to_wrap: tuple[str, ...] | None
    """Layer classes that become units; None for the model's own, which preflight finds and records in its report."""
    min_num_params: int | None
    peft_wrap_policy: bool | None
    use_orig_params: bool | None
    sync_module_states: bool | None
    reshard_after_forward: bool | None
    """Whether gathered parameters are freed; None under version 2 if preflight chooses it and records it in its report."""
    offload_params: bool
    param_dtype: Dtype | None
    reduce_dtype: Dtype | None


class ParallelismPlan(Ranks):
    """Ranks and how they share the weights."""

    fsdp: FsdpPlan

    @property
    def leaves_resharding_open(self) -> bool:
        """Whether preflight chooses if ranks free gathered parameters after the forward pass."""
        return self.world_size > 1 and self.fsdp.version == 2 and self.fsdp.reshard_after_forward is None


class CheckpointPlan(PlanModel):
    """The interval between checkpoints, in steps or seconds, whichever comes first, and the number that is kept."""

    every_steps: int
    every_seconds: int | None = None
    """Seconds after which a checkpoint is due; None if only steps count."""
    adaptive: bool = False
    """Whether lost attempts shorten the interval."""
    asynchronous: bool = False
    keep: int


class EarlyStoppingPlan(PlanModel):
    """Early stopping of a run that no longer improves."""

    patience: int
    min_delta: float


class EvaluationPlan(PlanModel):
    """Held-out loss."""

    every_steps: int | None
    """Steps between evaluations; None for only before the first step and after the last."""
    early_stopping: EarlyStoppingPlan | None = None
    load_best_model_at_end: bool = False


class MergePlanSettings(MergeSwitch):
    """Merge and verification."""

    base: MergeBase = MergeBase.ORIGINAL
    dtype: Dtype | None
    max_shard_bytes: int
    num_prompts: int
    max_kl_divergence: float | None
    min_top1_agreement: float | None


class Choice(PlanModel):
    """A value that the user left unset and the plan or preflight fixed."""

    field: str
    value: Any
    """The value; None if preflight chooses it."""
    reason: str


class RunPlan(LaunchPlan):
    """Everything that a container needs to know."""

    job: JobIdentity
    model: ModelPlan
    data: DataPlan
    method: MethodPlan
    training: TrainingPlan
    parallelism: ParallelismPlan
    checkpoint: CheckpointPlan
    evaluation: EvaluationPlan
    merge: MergePlanSettings
    rehearses: bool = False
    """Whether preflight tries the job on a scaled-down model."""
    sample_answers: int = 0
    """Number of held-out records that the report shows with the answers of base and tuned model."""
    choices: tuple[Choice, ...]

    def leaves_open(self, field: str) -> bool:
        """Whether preflight chooses this field; until then `training` has the value that is used if it cannot choose."""
        return any(choice.field == field and choice.value is None for choice in self.choices)

    @property
    def batch_unit(self) -> int:
        """Number of sequences of which the global batch must be a multiple: a micro-batch that the manifest sets is kept."""
        is_chosen = any(choice.field == MICRO_BATCH_FIELD for choice in self.choices)
        return self.parallelism.world_size * (1 if is_chosen else self.training.micro_batch_size)

    @property
    def leaves_batches_open(self) -> bool:
        """Whether preflight chooses how a rank computes its share of a step."""
        return self.leaves_open(MICRO_BATCH_FIELD) or self.leaves_open(RECOMPUTATION_FIELD)

    @property
    def leaves_attention_open(self) -> bool:
        """Whether preflight chooses the attention implementation."""
        return self.leaves_open(ATTENTION_FIELD)

    def wrong_choice(self, chosen: Iterable[Choice]) -> Choice | None:
        """Return the first choice for an open field whose value preflight could not have chosen for this plan."""
        chosen = [choice for choice in chosen if self.leaves_open(choice.field)]
        batch = [choice for choice in chosen if choice.field == GLOBAL_BATCH_FIELD]
        if batch and all(map(self._can_be, batch)):
            return self.with_choices(batch).wrong_choice(chosen)
        return next((choice for choice in chosen if not self._can_be(choice)), None)

    def _can_be(self, choice: Choice) -> bool:
        value = choice.value
        if choice.field == GLOBAL_BATCH_FIELD:
            return type(value) is int and 1 <= value <= self.training.global_batch_size and value % self.batch_unit == 0
        if choice.field == MICRO_BATCH_FIELD:
            of_rank = self.training.global_batch_size // self.parallelism.world_size
            return type(value) is int and 1 <= value <= of_rank and of_rank % value == 0
        if choice.field == RECOMPUTATION_FIELD:
            return isinstance(value, str) and value in list(ActivationCheckpointing)
        if choice.field == ATTENTION_FIELD:
            return value in (Attention.SDPA, Attention.VARLEN)
        if choice.field == PRECISION_FIELD:
            return isinstance(value, str) and value in {*Precision, *Dtype}
        return choice.field != RESHARDING_FIELD or isinstance(value, bool)

    def with_choices(self, chosen: Iterable[Choice]) -> Self:
        """Return the plan with the values that preflight chose for open fields; other choices are ignored."""
        by_field = {choice.field: choice for choice in chosen if self.leaves_open(choice.field)}
        if not by_field:
            return self
        plan = self.model_copy(update={"choices": tuple(by_field.get(choice.field, choice) for choice in self.choices)})
        if RESHARDING_FIELD in by_field:
            plan = plan.with_fsdp(reshard_after_forward=by_field[RESHARDING_FIELD].value)
        if GLOBAL_BATCH_FIELD in by_field:
            plan = plan.with_training(global_batch_size=by_field[GLOBAL_BATCH_FIELD].value)
        if MICRO_BATCH_FIELD in by_field:
            plan = plan.with_training(micro_batch_size=by_field[MICRO_BATCH_FIELD].value)
        if RECOMPUTATION_FIELD in by_field:
            plan = plan.with_training(activation_checkpointing=ActivationCheckpointing(by_field[RECOMPUTATION_FIELD].value))
        if ATTENTION_FIELD in by_field:
            plan = plan.with_attention(Attention(by_field[ATTENTION_FIELD].value))
        if PRECISION_FIELD in by_field and by_field[PRECISION_FIELD].value == Precision.BF16 and not self.method.is_fused:
            # Fused adapters compute in the base's type anyway, without the copies that autocast keeps.
            plan = plan.with_training(precision=Precision.BF16).with_fsdp(param_dtype=Dtype.BFLOAT16)
        return plan

    def with_attention(self, attention: Attention) -> Self:
        """Return the plan with another attention implementation."""
        return self.model_copy(update={"model": self.model.model_copy(update={"attention": attention})})

    def with_training(self, **values: Any) -> Self:
        """Return the plan with other values of `TrainingPlan`, and the accumulation that follows from them."""
        training = self.training.model_copy(update=values)
        at_once = training.micro_batch_size * self.parallelism.world_size
        training = training.model_copy(update={"gradient_accumulation_steps": training.global_batch_size // at_once})
        return self.model_copy(update={"training": training})

    def with_fsdp(self, **values: Any) -> Self:
        """Return the plan with other values of `FsdpPlan`."""
        fsdp = self.parallelism.fsdp.model_copy(update=values)
        return self.model_copy(update={"parallelism": self.parallelism.model_copy(update={"fsdp": fsdp})})


ATTENTION_FIELD = "spec.model.attention"
PRECISION_FIELD = "spec.training.precision"
RESHARDING_FIELD = "spec.parallelism.fsdp.reshardAfterForward"
GLOBAL_BATCH_FIELD = "spec.training.globalBatchSize"
MICRO_BATCH_FIELD = "spec.training.microBatchSize"
RECOMPUTATION_FIELD = "spec.training.activationCheckpointing"
TRAINED_ROWS_FIELD = "spec.method.lora.trainableTokenIndices"


def optional_float(text: str | None) -> float | None:
    return None if text is None else float(text)

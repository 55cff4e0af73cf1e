"""The frozen contract between operator, command line and trainer: every value is either resolved or left to preflight.

Numbers that are strings in the spec are floats here, because programs compute with them; floats survive a round trip through
Python's JSON. Values that depend on the model itself (the layer classes to wrap) stay None; preflight resolves them into its
report. A field's default is the behaviour of releases that did not have the field; `resolve` sets every field, and choices.py
records those that the user left unset.
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
        """Return the token in the form that a manifest has."""
        return self.model_dump(mode="json", exclude_defaults=True)


class ModelPlan(PlacedModel):
    """Base model."""

    name: str
    """Name on the Hub, `<org>/<name>`, if the manifest contains it; otherwise the source as the user wrote it."""
    revision: str | None = None
    dtype: Dtype | None
    """Element type of the base; None for the type in which it is stored."""
    attention: Attention
    max_positions: int | None = None
    """Maximum number of positions, only for models with rotary embeddings; None for the number in config.json."""
    added_tokens: tuple[AddedTokenPlan, ...] = ()
    """Added tokens, in ascending order of their ids."""
    allow_remote_code: bool

    @model_validator(mode="before")
    @classmethod
    def _named_by_location(cls, content: Any) -> Any:
        """Accept plans of the first releases, which could only read from claims and named the base by its location."""
        if isinstance(content, dict) and "name" not in content and isinstance(content.get("location"), dict):
            return content | {"name": claim_source(content["location"])}
        return content


class DatasetPlan(PlacedRecords):
    """A file or directory of records."""

    source: str
    """The source as the user wrote it, for messages."""
    weight: float
    """How many times each record occurs in one pass over the data."""
    splits: tuple[str, ...] = ()
    """Candidate splits of a directory: the first one that exists is read. If empty, all files are read."""
    split_is_chosen: bool = False
    """Whether the user named the split; if so, a directory without that split is refused."""


class DataPlan(PlacedData):
    """The records and how they are tokenised."""

    train: tuple[DatasetPlan, ...]
    validation: DatasetPlan | None
    format: DataFormat
    mapping: MappingPlan = UNMAPPED
    chat_template: str | None = None
    """The chat template's Jinja source, even if the user named a built-in template; None for the tokenizer's own template."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    max_sequence_length: int
    packing: bool
    on_invalid_record: OnInvalidRecord = OnInvalidRecord.FAIL
    loss_on: LossOn


class TrainingPlan(PlanModel):
    """The settings of training."""

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
    """Gradient norm above which gradients are clipped; 0 for no clipping."""
    precision: Precision | None
    """Precision of the computation; None for the types in which base and adapters are held. On GPUs preflight may choose it."""
    activation_checkpointing: ActivationCheckpointing
    compile: bool = False
    reduction: GradientReduction = GradientReduction.FAST
    deterministic: bool = False
    step_timeout_seconds: int = 3600
    """Time limit of a step. The default of one hour is the timeout of collectives, the only limit before there was a watchdog."""
    trackers: tuple[str, ...] = ()
    start_from: ClaimPath | None = None
    """Checkpoint of another job from which the trained parameters are initialised; None for the method's own initialisation."""
    seed: int


class FsdpPlan(PlanModel):
    """The settings of FSDP. Fields that only one version has are None under the other."""

    version: int
    auto_wrap_policy: AutoWrapPolicy
    transformer_layer_cls_to_wrap: tuple[str, ...] | None
    """Layer classes that become FSDP units; None for the model's own classes, which preflight records in its report."""
    min_num_params: int | None
    peft_wrap_policy: bool | None
    use_orig_params: bool | None
    sync_module_states: bool | None
    reshard_after_forward: bool | None
    """Whether gathered parameters are freed after forward; None under version 2 if preflight chooses and reports it."""
    offload_params: bool
    param_dtype: Dtype | None
    reduce_dtype: Dtype | None


class ParallelismPlan(Ranks):
    """Ranks and how they share the weights."""

    fsdp: FsdpPlan

    @property
    def leaves_resharding_open(self) -> bool:
        """Whether it is left to preflight if ranks free gathered parameters after the forward pass."""
        return self.world_size > 1 and self.fsdp.version == 2 and self.fsdp.reshard_after_forward is None


class CheckpointPlan(PlanModel):
    """The interval between checkpoints, in steps or seconds, whichever comes first, and how many checkpoints are kept."""

    every_steps: int
    every_seconds: int | None = None
    """Seconds after which a checkpoint is due; None if only steps count."""
    adaptive: bool = False
    """Whether the interval is shortened after attempts are lost."""
    asynchronous: bool = False
    keep: int


class EarlyStoppingPlan(PlanModel):
    """When to stop a run that no longer improves."""

    patience: int
    min_delta: float


class EvaluationPlan(PlanModel):
    """When to evaluate the held-out loss."""

    every_steps: int | None
    """Steps between evaluations; if None, there are only two, before the first step and after the last."""
    early_stopping: EarlyStoppingPlan | None = None
    load_best_model_at_end: bool = False


class MergePlanSettings(MergeSwitch):
    """How to merge the adapter and verify the result."""

    base: MergeBase = MergeBase.ORIGINAL
    dtype: Dtype | None
    max_shard_bytes: int
    num_prompts: int
    max_kl_divergence: float | None
    min_top1_agreement: float | None


class Choice(PlanModel):
    """A value that the user left unset and that the plan or preflight chose."""

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
    """Whether preflight rehearses the job on a scaled-down model."""
    sample_answers: int = 0
    """Number of held-out records for which the report shows the answers of the base model and the tuned model."""
    choices: tuple[Choice, ...]

    def leaves_open(self, field: str) -> bool:
        """Whether this field is left to preflight. Until preflight chooses, `training` contains the fallback value."""
        return any(choice.field == field and choice.value is None for choice in self.choices)

    @property
    def batch_unit(self) -> int:
        """Number that the global batch must be a multiple of: the ranks, times the micro-batch if the manifest sets one."""
        is_chosen = any(choice.field == MICRO_BATCH_FIELD for choice in self.choices)
        return self.parallelism.world_size * (1 if is_chosen else self.training.micro_batch_size)

    @property
    def leaves_batches_open(self) -> bool:
        """Whether it is left to preflight how a rank divides its share of a step into micro-batches."""
        return self.leaves_open(MICRO_BATCH_FIELD) or self.leaves_open(RECOMPUTATION_FIELD)

    @property
    def leaves_attention_open(self) -> bool:
        """Whether preflight chooses the attention implementation."""
        return self.leaves_open(ATTENTION_FIELD)

    def wrong_choice(self, chosen: Iterable[Choice]) -> Choice | None:
        """Return the first choice for an open field whose value is not one that preflight may choose for this plan."""
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
            # Not for fused adapters: they already compute in the base's type, without the copies that autocast keeps.
            plan = plan.with_training(precision=Precision.BF16).with_fsdp(param_dtype=Dtype.BFLOAT16)
        return plan

    def with_attention(self, attention: Attention) -> Self:
        """Return the plan with this attention implementation."""
        return self.model_copy(update={"model": self.model.model_copy(update={"attention": attention})})

    def with_training(self, **values: Any) -> Self:
        """Return the plan with these values of `TrainingPlan` replaced, and gradient accumulation adjusted to them."""
        training = self.training.model_copy(update=values)
        at_once = training.micro_batch_size * self.parallelism.world_size
        training = training.model_copy(update={"gradient_accumulation_steps": training.global_batch_size // at_once})
        return self.model_copy(update={"training": training})

    def with_fsdp(self, **values: Any) -> Self:
        """Return the plan with these values of `FsdpPlan` replaced."""
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

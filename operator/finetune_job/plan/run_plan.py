"""The frozen contract between operator, command line and trainer: every value resolved, none left to choose.

Numbers that the spec writes as strings are floats here, because this is where they are used; JSON written by Python reads back
to the same float. What only the model itself can tell (the layer classes to wrap) stays None and is resolved by preflight into
its report. Defaults here are what the releases did that had no such field; `resolve` sets every field, and choices.py records
those that the user left open.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Self

from pydantic import model_validator

from finetune_job.api.base import ClaimPath
from finetune_job.api.enumerations import Dtype, MergeBase
from finetune_job.api.inputs import Attention, DataFormat, LossOn
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
    """Which job this plan belongs to."""

    namespace: str
    name: str
    uid: str


class AddedTokenPlan(PlanModel):
    """A token that the tokenizer does not have."""

    content: str
    special: bool = False
    stop: bool = False

    def written(self) -> dict[str, Any]:
        """As a manifest has it."""
        return self.model_dump(mode="json", exclude_defaults=True)


class ModelPlan(PlacedModel):
    """Base model."""

    name: str
    """`<org>/<name>` of the Hub if the manifest says it, or the source as the user wrote it."""
    revision: str | None = None
    dtype: Dtype | None
    """None: as stored."""
    attention: Attention
    max_positions: int | None = None
    """None: as config.json says. Only of rotary positions."""
    added_tokens: tuple[AddedTokenPlan, ...] = ()
    """In the order of their ids."""
    allow_remote_code: bool

    @model_validator(mode="before")
    @classmethod
    def _named_by_location(cls, content: Any) -> Any:
        """The first releases read from claims alone, and called the base by its place."""
        if isinstance(content, dict) and "name" not in content and isinstance(content.get("location"), dict):
            return content | {"name": claim_source(content["location"])}
        return content


class DatasetPlan(PlacedRecords):
    """A file or directory of records."""

    source: str
    """As the user wrote it, for messages."""
    weight: float
    """How often each record occurs in one pass."""
    splits: tuple[str, ...] = ()
    """Of a directory whose files name splits, those of the first of these that there is; none: all files."""
    split_is_chosen: bool = False
    """Whether the user named the split, so that a directory without it is refused."""


class DataPlan(PlacedData):
    """Records and their tokenisation."""

    train: tuple[DatasetPlan, ...]
    validation: DatasetPlan | None
    format: DataFormat
    mapping: MappingPlan = UNMAPPED
    chat_template: str | None = None
    """Jinja, also of a template that the user named. None: the tokenizer's."""
    max_sequence_length: int
    packing: bool
    loss_on: LossOn


class TrainingPlan(PlanModel):
    """Optimisation."""

    REMOVED: ClassVar[frozenset[str]] = frozenset({"fp8"})
    epochs: int | None
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    """globalBatchSize = microBatchSize x ranks x this."""
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
    """0: no clipping."""
    precision: Precision | None
    """None: as the base is held, and as adapters are held; on a GPU preflight may choose it."""
    activation_checkpointing: ActivationCheckpointing
    compile: bool = False
    reduction: GradientReduction = GradientReduction.FAST
    deterministic: bool = False
    step_timeout_seconds: int = 3600
    """Without a watchdog of the steps, what ended a rank that waited for others was the time-out of an hour on their messages."""
    trackers: tuple[str, ...] = ()
    start_from: ClaimPath | None = None
    """Checkpoint of another job whose trained parameters are the first ones; None: the method's own."""
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
    """None under version 2: as preflight chooses for this model and writes down in its report."""
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
    """When a checkpoint is due, after so many steps or seconds, whichever comes first, and how it is kept."""

    every_steps: int
    every_seconds: int | None = None
    """None: steps alone."""
    adaptive: bool = False
    """Whether losses make the interval shorter."""
    asynchronous: bool = False
    keep: int


class EarlyStoppingPlan(PlanModel):
    """End of a run that no longer gets better."""

    patience: int
    min_delta: float


class EvaluationPlan(PlanModel):
    """Held-out loss."""

    every_steps: int | None
    """None: only before the first step and after the last."""
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
    """A value that the user left open and the plan or preflight fixed."""

    field: str
    value: Any
    """None: preflight chooses."""
    reason: str


class RunPlan(LaunchPlan):
    """Everything a container needs to know."""

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
    """Held-out records that the report shows with the answers of base and tuned model."""
    choices: tuple[Choice, ...]

    def leaves_open(self, field: str) -> bool:
        """Whether preflight chooses this field, for which `training` then has what is taken if nobody can choose."""
        return any(choice.field == field and choice.value is None for choice in self.choices)

    @property
    def leaves_batches_open(self) -> bool:
        """Whether preflight chooses how a rank computes its share of a step."""
        return self.leaves_open(MICRO_BATCH_FIELD) or self.leaves_open(RECOMPUTATION_FIELD)

    @property
    def leaves_attention_open(self) -> bool:
        """Whether preflight chooses the attention implementation."""
        return self.leaves_open(ATTENTION_FIELD)

    def wrong_choice(self, chosen: Iterable[Choice]) -> Choice | None:
        """The first of what is left open here that has a value which no preflight chooses for this plan."""
        return next((each for each in chosen if self.leaves_open(each.field) and not self._can_be(each)), None)

    def _can_be(self, choice: Choice) -> bool:
        value = choice.value
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
        """With values that preflight chose, of what is left open here. Other choices are not looked at."""
        by_field = {choice.field: choice for choice in chosen if self.leaves_open(choice.field)}
        if not by_field:
            return self
        plan = self.model_copy(update={"choices": tuple(by_field.get(each.field, each) for each in self.choices)})
        if RESHARDING_FIELD in by_field:
            plan = plan.with_fsdp(reshard_after_forward=by_field[RESHARDING_FIELD].value)
        if MICRO_BATCH_FIELD in by_field:
            plan = plan.with_training(micro_batch_size=by_field[MICRO_BATCH_FIELD].value)
        if RECOMPUTATION_FIELD in by_field:
            plan = plan.with_training(activation_checkpointing=ActivationCheckpointing(by_field[RECOMPUTATION_FIELD].value))
        if ATTENTION_FIELD in by_field:
            plan = plan.with_attention(Attention(by_field[ATTENTION_FIELD].value))
        if PRECISION_FIELD in by_field and by_field[PRECISION_FIELD].value == Precision.BF16 and not self.method.is_fused:
            # What is fused computes in the base's type by itself, without the copies that autocast keeps.
            plan = plan.with_training(precision=Precision.BF16).with_fsdp(param_dtype=Dtype.BFLOAT16)
        return plan

    def with_attention(self, attention: Attention) -> Self:
        """With another attention implementation."""
        return self.model_copy(update={"model": self.model.model_copy(update={"attention": attention})})

    def with_training(self, **values: Any) -> Self:
        """With other values of fields of `TrainingPlan`; the global batch stays what it is."""
        training = self.training.model_copy(update=values)
        at_once = training.micro_batch_size * self.parallelism.world_size
        training = training.model_copy(update={"gradient_accumulation_steps": training.global_batch_size // at_once})
        return self.model_copy(update={"training": training})

    def with_fsdp(self, **values: Any) -> Self:
        """With other values of fields of `FsdpPlan`."""
        fsdp = self.parallelism.fsdp.model_copy(update=values)
        return self.model_copy(update={"parallelism": self.parallelism.model_copy(update={"fsdp": fsdp})})


ATTENTION_FIELD = "spec.model.attention"
PRECISION_FIELD = "spec.training.precision"
RESHARDING_FIELD = "spec.parallelism.fsdp.reshardAfterForward"
MICRO_BATCH_FIELD = "spec.training.microBatchSize"
RECOMPUTATION_FIELD = "spec.training.activationCheckpointing"
TRAINED_ROWS_FIELD = "spec.method.lora.trainableTokenIndices"


def optional_float(text: str | None) -> float | None:
    return None if text is None else float(text)

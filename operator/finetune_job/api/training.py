"""`spec.training`, `spec.checkpoint` and `spec.evaluation`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from finetune_job.api.base import ApiModel, ClaimDirectory, DecimalString


class Scheduler(StrEnum):
    """Course of the learning rate after the warm-up."""

    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"
    INVERSE_SQRT = "InverseSqrt"
    """Falls in proportion to one over the square root of the step."""
    WARMUP_STABLE_DECAY = "WarmupStableDecay"
    """Constant, then linear over the last decayRatio of the steps."""


class OptimizerName(StrEnum):
    """Optimizers, by the names torch gives them. Their state is kept per element, so any number of ranks can read it."""

    ADAMW = "AdamW"
    RADAM = "RAdam"
    SGD = "SGD"


class Precision(StrEnum):
    """Element type of activations and matrix products."""

    BF16 = "bf16"
    FP32 = "fp32"


class ActivationCheckpointing(StrEnum):
    """Whether activations are kept or recomputed in the backward pass."""

    NONE = "None"
    SELECTIVE = "Selective"
    """Keeps the results of matrix products and attention, and recomputes only what is cheap."""
    FULL = "Full"


class GradientReduction(StrEnum):
    """The order in which the gradients of ranks are added up."""

    FAST = "Fast"
    """Adds gradients in the order of the collective library, which depends on the number of ranks."""
    ORDERED = "Ordered"
    """Adds gradients in a fixed order: the result has the same bytes on any number of ranks up to the job's."""


TrackerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,63}$", max_length=63)]


class TrainingSpec(ApiModel):
    """Optimisation: optimizer, schedule and batches."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Passes over the data. Set exactly one of epochs and maxSteps."""
    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Optimizer steps. Set exactly one of epochs and maxSteps."""
    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Sequences per optimizer step, over all ranks. Unset: 16, or the next number that splits evenly over ranks and
    micro-batches; if the data make fewer sequences, preflight chooses the largest such number that they fill."""
    micro_batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Sequences per rank and forward pass. Unset: the largest divisor of globalBatchSize / ranks, at most 8, for which preflight
    finds that a rank has memory."""
    learning_rate: DecimalString | None = None
    """Peak learning rate. Unset: "2e-4" for adapters, "2e-5" for Full."""
    optimizer: OptimizerName | None = None
    """Optimizer. Unset: AdamW."""
    adam_beta1: DecimalString | None = None
    """Decay of the first moment of AdamW and RAdam, below 1. Unset: "0.9"."""
    adam_beta2: DecimalString | None = None
    """Decay of the second moment of AdamW and RAdam, below 1. Unset: "0.999"."""
    adam_epsilon: DecimalString | None = None
    """Number added to the root of the second moment of AdamW and RAdam. Unset: "1e-8"."""
    momentum: DecimalString | None = None
    """Momentum of SGD, below 1. Unset: "0.9"."""
    scheduler: Scheduler | None = None
    """Course of the learning rate. Unset: Cosine."""
    warmup_ratio: DecimalString | None = None
    """Share of the steps, below 1, during which the rate rises to its peak. Unset: "0.03"."""
    min_learning_rate_ratio: DecimalString | None = None
    """Lowest rate after the warm-up, as a share of the peak, at most 1. Unset: "0"."""
    decay_ratio: DecimalString | None = None
    """Share of the steps, at most 1, over which the rate of WarmupStableDecay falls. Unset: "0.2"."""
    weight_decay: DecimalString | None = None
    """Decoupled weight decay. Unset: "0"."""
    max_grad_norm: DecimalString | None = None
    """Global norm to which larger gradients are clipped; "0" turns clipping off. Unset: "1.0"."""
    precision: Precision | None = None
    """Element type of the computation. Unset: the type in which the base model is stored; then adapters compute in float32,
    except on a GPU with a bfloat16 base, where they compute in bfloat16."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Recomputation of activations. Unset: None, or as much as preflight finds necessary to fit a rank's memory."""
    compile: bool = False
    """Compile each layer with torch.compile: on a GPU a quarter more tokens per second, after half a minute of compilation."""
    reduction: GradientReduction = GradientReduction.FAST
    """Order in which the gradients of ranks are added up. Ordered: dropout and sums depend only on the job's number of ranks, so
    fewer ranks train the same bytes; each rank keeps the whole adapter. For LoRA, QLoRA, DoRA and QDoRA under FSDP 2."""
    deterministic: bool = False
    """Use only kernels that add in a fixed order, so that a run that was killed on GPUs ends with the same bytes as an
    undisturbed run on as many devices of the same kind. It is slower; an operation without such a kernel ends the run."""
    step_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 1800
    """A rank that finishes no step, evaluation or save within this time counts as stalled: the stacks of all ranks are collected
    and the attempt ends."""
    trackers: Annotated[list[TrackerName], Field(max_length=8)] | None = None
    """Experiment trackers that get each line of the history in addition to TensorBoard's files, which are always written: `wandb`
    or `mlflow`, if the trainer image has their package, or the name under which another package registers one. Unset: none."""
    start_from: ClaimDirectory | None = None
    """Checkpoint of another job on the same workspace claim, such as `tune-0a1b2c3d/checkpoints/step-0000000100`. Training begins
    at step 0 with its trained parameters and new states of optimizer, schedule and data. `finetune fork --from` sets this."""
    seed: Annotated[int, Field(ge=0, le=4_294_967_295)] = 0
    """Seed of the data order, dropout and adapter initialisation."""


class CheckpointSpec(ApiModel):
    """Checkpoints, from which an interrupted job continues."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Optimizer steps between two checkpoints."""
    every_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """Also save when this many seconds have passed since the latest checkpoint. Unset: steps alone decide."""
    adaptive: bool = False
    """Save more often once attempts have been lost, as on nodes that are taken back: at the interval of Young and Daly, from the
    measured time between losses and the measured time of a save. `everySteps` and `everySeconds` still limit the interval."""
    asynchronous: bool | None = None
    """Write while training continues, from a copy in host memory. Unset: true for Full, whose state is large, else false."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 2
    """Complete checkpoints kept; never fewer than two, because the newest may be the one that was damaged."""


class EarlyStopping(ApiModel):
    """Ending a run that no longer improves."""

    patience: Annotated[int, Field(ge=1, le=1000)] = 3
    """Evaluations in a row without improvement after which training ends."""
    min_delta: DecimalString = "0"
    """The held-out loss must fall by more than this to count as improvement."""


class EvaluationSpec(ApiModel):
    """Loss on the held-out records: before the first step, at an interval of steps, and at the end."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimizer steps between two evaluations. Unset: only before the first step and after the last."""
    early_stopping: EarlyStopping | None = None
    """Early stopping. Unset: the run continues to its last step. Needs everySteps and validation data."""
    load_best_model_at_end: bool = False
    """Keep the checkpoint with the lowest held-out loss, and export it instead of the last one. Needs validation data."""

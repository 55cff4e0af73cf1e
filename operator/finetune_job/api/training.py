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
    """Falls with one over the square root of the step."""
    WARMUP_STABLE_DECAY = "WarmupStableDecay"
    """Constant, then linear over the last decayRatio of the steps."""


class OptimizerName(StrEnum):
    """Optimizers, by the names torch gives them. Their state is kept per element, so that any number of ranks can read it."""

    ADAMW = "AdamW"
    RADAM = "RAdam"
    SGD = "SGD"


class Precision(StrEnum):
    """Element type of activations and matrix products."""

    BF16 = "bf16"
    FP32 = "fp32"


class ActivationCheckpointing(StrEnum):
    """Whether activations are kept or computed again in the backward pass."""

    NONE = "None"
    SELECTIVE = "Selective"
    """Keeps the results of matrix products and attention, and computes only what is cheap again."""
    FULL = "Full"


class GradientReduction(StrEnum):
    """How the gradients of ranks are added up."""

    FAST = "Fast"
    """In the order of the collective library, which depends on the number of ranks."""
    ORDERED = "Ordered"
    """In a fixed order: the result has the same bytes on any number of ranks up to the job's."""


TrackerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,63}$", max_length=63)]


class TrainingSpec(ApiModel):
    """Optimisation: optimizer, schedule and batches."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Passes over the data. Exactly one of epochs and maxSteps."""
    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Optimizer steps. Exactly one of epochs and maxSteps."""
    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Sequences per rank and forward pass. Unset: the largest divisor of globalBatchSize / ranks up to 8 that preflight finds to
    fit a rank's memory."""
    learning_rate: DecimalString | None = None
    """Peak learning rate. Unset: "2e-4" for adapters, "2e-5" for Full."""
    optimizer: OptimizerName | None = None
    """Optimizer. Unset: AdamW."""
    adam_beta1: DecimalString | None = None
    """Decay of the first moment of AdamW and RAdam, below 1. Unset: "0.9"."""
    adam_beta2: DecimalString | None = None
    """Decay of the second moment of AdamW and RAdam, below 1. Unset: "0.999"."""
    adam_epsilon: DecimalString | None = None
    """Added to the root of the second moment of AdamW and RAdam. Unset: "1e-8"."""
    momentum: DecimalString | None = None
    """Momentum of SGD, below 1. Unset: "0.9"."""
    scheduler: Scheduler | None = None
    """Course of the learning rate. Unset: Cosine."""
    warmup_ratio: DecimalString | None = None
    """Share of the steps in which the rate rises to its peak, below 1. Unset: "0.03"."""
    min_learning_rate_ratio: DecimalString | None = None
    """Share of the peak below which the rate never falls after the warm-up, at most 1. Unset: "0"."""
    decay_ratio: DecimalString | None = None
    """Share of the steps over which WarmupStableDecay falls, at most 1. Unset: "0.2"."""
    weight_decay: DecimalString | None = None
    """Decoupled weight decay. Unset: "0"."""
    max_grad_norm: DecimalString | None = None
    """Largest global gradient norm; "0" turns clipping off. Unset: "1.0"."""
    precision: Precision | None = None
    """Element type of the computation. Unset: that in which the base model is stored; of adapters float32, but on a GPU with a
    base in bfloat16 that as well."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Recomputation of activations. Unset: None, or as much as preflight finds that a rank's memory needs."""
    compile: bool = False
    """Compile each layer with torch.compile: on a GPU a quarter more tokens per second, after half a minute of compilation."""
    reduction: GradientReduction = GradientReduction.FAST
    """How the gradients of ranks are added up. Ordered: dropout and sums depend on the job's number of ranks alone, so that fewer
    ranks train the same bytes; each rank keeps the whole adapter. For LoRA, QLoRA, DoRA and QDoRA under FSDP 2."""
    deterministic: bool = False
    """Use only kernels and orders of sums that are fixed, so that a run that was killed on GPUs ends with the same bytes as an
    undisturbed one on as many devices of the same kind. It takes time; an operation without such a kernel ends the run."""
    step_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 1800
    """A rank that finishes no step, evaluation or save within this time counts as stalled: the stacks of all ranks are collected
    and the attempt ends."""
    trackers: Annotated[list[TrackerName], Field(max_length=8)] | None = None
    """Experiment trackers that get each line of the history in addition to TensorBoard's files, which are always written: `wandb`
    or `mlflow`, if the trainer image has their package, or the name under which another package registers one. Unset: none."""
    start_from: ClaimDirectory | None = None
    """Checkpoint of another job on the same workspace claim, such as `tune-0a1b2c3d/checkpoints/step-0000000100`. Training begins
    at step 0 with its trained parameters; optimizer, schedule and data begin again. `finetune fork --from` writes it."""
    seed: Annotated[int, Field(ge=0, le=4_294_967_295)] = 0
    """Seed of the data order, dropout and adapter initialisation."""


class CheckpointSpec(ApiModel):
    """What survives an interruption."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Optimizer steps between two checkpoints."""
    every_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """Also save when this many seconds have passed since the latest checkpoint. Unset: steps alone decide."""
    adaptive: bool = False
    """Save more often once attempts have been lost, as on nodes that are taken back: at the interval of Young and Daly, from the
    measured time between losses and the measured time of a save. `everySteps` and `everySeconds` stay the longest interval."""
    asynchronous: bool | None = None
    """Write while training continues, from a copy in host memory. Unset: true for Full, whose state is large, else false."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 2
    """Complete checkpoints kept; never fewer than two, because the newest may be the one that was damaged."""


class EarlyStopping(ApiModel):
    """End of a run that no longer gets better."""

    patience: Annotated[int, Field(ge=1, le=1000)] = 3
    """Evaluations in a row without improvement after which training ends."""
    min_delta: DecimalString = "0"
    """Held-out loss must fall by more than this to count as improvement."""


class EvaluationSpec(ApiModel):
    """Loss on the held-out records: before the first step, every so many steps, and at the end."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimizer steps between two evaluations. Unset: only before the first step and after the last."""
    early_stopping: EarlyStopping | None = None
    """Unset: the run goes to its last step. Needs everySteps and validation data."""
    load_best_model_at_end: bool = False
    """Keep the checkpoint with the lowest held-out loss and export it instead of the last. Needs validation data."""

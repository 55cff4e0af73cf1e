"""`spec.training`, `spec.checkpoint` and `spec.evaluation`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_job.api.base import ApiModel, DecimalString


class Scheduler(StrEnum):
    """Course of the learning rate after the warm-up."""

    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"


class Precision(StrEnum):
    """Element type of activations and matrix products."""

    BF16 = "bf16"
    FP32 = "fp32"


class ActivationCheckpointing(StrEnum):
    """Whether activations are kept or computed again in the backward pass."""

    NONE = "None"
    FULL = "Full"


class TrainingSpec(ApiModel):
    """Optimisation: AdamW, its schedule and its batches."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Passes over the data. Exactly one of epochs and maxSteps."""
    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Optimizer steps. Exactly one of epochs and maxSteps."""
    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Sequences per rank and forward pass. Unset: the largest divisor of globalBatchSize / ranks up to 8."""
    learning_rate: DecimalString | None = None
    """Peak learning rate. Unset: "2e-4" for adapters, "2e-5" for Full."""
    scheduler: Scheduler | None = None
    """Course of the learning rate. Unset: Cosine."""
    warmup_ratio: DecimalString | None = None
    """Share of the steps in which the rate rises to its peak, below 1. Unset: "0.03"."""
    weight_decay: DecimalString | None = None
    """Decoupled weight decay. Unset: "0"."""
    max_grad_norm: DecimalString | None = None
    """Largest global gradient norm; "0" turns clipping off. Unset: "1.0"."""
    precision: Precision | None = None
    """Element type of the computation. Unset: bf16, or fp32 for a float32 model."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Recomputation of activations. Unset: None."""
    seed: Annotated[int, Field(ge=0, le=4_294_967_295)] = 0
    """Seed of the data order, dropout and adapter initialisation."""


class CheckpointSpec(ApiModel):
    """What survives an interruption."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Optimizer steps between two checkpoints."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 2
    """Complete checkpoints kept; never fewer than two, because the newest may be the one that was damaged."""


class EvaluationSpec(ApiModel):
    """Loss on the held-out records: before the first step, every so many steps, and at the end."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimizer steps between two evaluations. Unset: only before the first step and after the last."""

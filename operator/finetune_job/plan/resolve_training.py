"""Resolves the parts of a plan for optimisation, checkpoints and evaluation."""

from __future__ import annotations

from finetune_job.api.base import ClaimPath
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import MethodType
from finetune_job.api.training import ActivationCheckpointing, EvaluationSpec, OptimizerName, Precision, Scheduler
from finetune_job.plan.choices import Choices
from finetune_job.plan.run_plan import (
    GLOBAL_BATCH_FIELD,
    MICRO_BATCH_FIELD,
    PRECISION_FIELD,
    RECOMPUTATION_FIELD,
    CheckpointPlan,
    EarlyStoppingPlan,
    EvaluationPlan,
    TrainingPlan,
)

USUAL_BATCH = 16
"""Default global batch, if it divides evenly among ranks and micro-batches and there are enough records to fill it."""
LARGEST_CHOSEN_MICRO_BATCH = 8
"""Largest micro-batch that is chosen, in sequences; beyond that, activation memory grows faster than throughput."""


ADAM_BETAS, ADAM_EPSILON, MOMENTUM = ("0.9", "0.999"), "1e-8", "0.9"
"""Values recommended in the papers (Kingma and Ba, 2015; Sutskever et al., 2013). Where torch has a default, it is the same."""
MIN_LEARNING_RATE_RATIO, DECAY_RATIO = "0", "0.2"
USUAL_LEARNING_RATES = {True: "2e-5", False: "2e-4"}
"""Whether the model's own weights are trained -> default learning rate, for all optimizers."""
USUAL_SGD_LEARNING_RATE = "0.01"
"""Learning rate proposed for SGD, for which the rates above are far too low."""


def training_plan(spec: FineTuneJobSpec, choices: Choices, workspace: ClaimPath, *, on_gpu: bool) -> TrainingPlan:
    """Resolve the settings of training. workspace: the directory of the job on its claim."""
    training = spec.training
    full = spec.method.type is MethodType.FULL
    unit = world_size(spec) * (training.micro_batch_size or 1)
    usual = -(-USUAL_BATCH // unit) * unit
    reason = f"preflight chooses: {usual}, or fewer if the data make fewer sequences"
    batch = choices.leave(GLOBAL_BATCH_FIELD, training.global_batch_size, usual, reason)
    per_rank = batch // world_size(spec)
    sizes = micro_batch_sizes(per_rank)
    micro = (
        choices.leave(
            MICRO_BATCH_FIELD,
            training.micro_batch_size,
            sizes[0],
            f"preflight chooses: the largest of {', '.join(map(str, sizes))} that fits a rank's memory",
        )
        if len(sizes) > 1
        else choices.pick("training.microBatchSize", training.micro_batch_size, sizes[0], "the whole share of a rank")
    )
    return TrainingPlan(
        epochs=training.epochs,
        max_steps=training.max_steps,
        global_batch_size=batch,
        micro_batch_size=micro,
        gradient_accumulation_steps=per_rank // micro,
        learning_rate=float(
            choices.pick("training.learningRate", training.learning_rate, USUAL_LEARNING_RATES[full], "usual for this method")
        ),
        optimizer=choices.pick("training.optimizer", training.optimizer, OptimizerName.ADAMW, "usual for transformers"),
        adam_betas=(float(training.adam_beta1 or ADAM_BETAS[0]), float(training.adam_beta2 or ADAM_BETAS[1])),
        adam_epsilon=float(training.adam_epsilon or ADAM_EPSILON),
        momentum=float(training.momentum or MOMENTUM),
        scheduler=choices.pick("training.scheduler", training.scheduler, Scheduler.COSINE, "ends at zero"),
        min_learning_rate_ratio=float(training.min_learning_rate_ratio or MIN_LEARNING_RATE_RATIO),
        decay_ratio=float(training.decay_ratio or DECAY_RATIO),
        warmup_ratio=float(choices.pick("training.warmupRatio", training.warmup_ratio, "0.03", "Adam's moments settle first")),
        weight_decay=float(choices.pick("training.weightDecay", training.weight_decay, "0", "usual for fine-tuning")),
        max_grad_norm=float(
            choices.pick("training.maxGradNorm", training.max_grad_norm, "1.0", "one bad batch cannot ruin a run")
        ),
        precision=_precision(spec, choices) if on_gpu else training.precision,
        activation_checkpointing=choices.leave(
            RECOMPUTATION_FIELD,
            training.activation_checkpointing,
            ActivationCheckpointing.NONE,
            "preflight chooses: None if a micro-batch fits without it, because recomputation takes up to half as much time again",
        ),
        compile=training.compile,
        reduction=training.reduction,
        deterministic=training.deterministic,
        step_timeout_seconds=training.step_timeout_seconds,
        trackers=tuple(training.trackers or ()),
        start_from=None if training.start_from is None else ClaimPath(claim=workspace.claim, path=training.start_from),
        seed=training.seed,
    )


def _precision(spec: FineTuneJobSpec, choices: Choices) -> Precision | None:
    """Resolve the precision. If the manifest leaves it unset, preflight chooses it by the element type of the base."""
    mixed = spec.parallelism.fsdp.mixed_precision
    if mixed is not None and mixed.param_dtype is not None:
        return spec.training.precision
    reason = f"preflight chooses: {Precision.BF16} for a base model in bfloat16, else the type that it is stored in"
    return choices.leave(PRECISION_FIELD, spec.training.precision, None, reason)


def checkpoint_plan(spec: FineTuneJobSpec, choices: Choices) -> CheckpointPlan:
    is_large = spec.method.type is MethodType.FULL
    return CheckpointPlan(
        every_steps=spec.checkpoint.every_steps,
        every_seconds=spec.checkpoint.every_seconds,
        adaptive=spec.checkpoint.adaptive,
        asynchronous=choices.pick(
            "checkpoint.asynchronous",
            spec.checkpoint.asynchronous,
            is_large,
            "the state is large" if is_large else "an adapter's state is written in less than a second",
        ),
        keep=spec.checkpoint.keep,
    )


def evaluation_plan(evaluation: EvaluationSpec) -> EvaluationPlan:
    stopping = evaluation.early_stopping
    return EvaluationPlan(
        every_steps=evaluation.every_steps,
        early_stopping=None
        if stopping is None
        else EarlyStoppingPlan(patience=stopping.patience, min_delta=float(stopping.min_delta)),
        load_best_model_at_end=evaluation.load_best_model_at_end,
    )


def world_size(spec: FineTuneJobSpec) -> int:
    """Number of ranks."""
    return spec.parallelism.nodes * spec.parallelism.processes_per_node


def micro_batch_sizes(sequences_per_rank: int) -> list[int]:
    """List the divisors of a rank's share of the global batch, up to `LARGEST_CHOSEN_MICRO_BATCH`, the largest first."""
    return [size for size in range(LARGEST_CHOSEN_MICRO_BATCH, 0, -1) if max(sequences_per_rank, 1) % size == 0]

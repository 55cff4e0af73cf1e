"""Length of the run, learning rate, recomputation."""

from __future__ import annotations

from decimal import Decimal

from finetune_job.api.training import ActivationCheckpointing, Scheduler
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule

_EPOCHS = "training.epochs"
_STEPS = "training.maxSteps"
_WARMUP = "training.warmupRatio"
_DECAY = "training.decayRatio"
_LEAST = "training.minLearningRateRatio"
_SCHEDULER = "training.scheduler"
_RATE = "training.learningRate"
_RECOMPUTE = "training.activationCheckpointing"
_FSDP_RECOMPUTE = "parallelism.fsdp.activationCheckpointing"
_LOSS_ON = "data.lossOn"


@rule(
    "epochs-or-max-steps",
    "A run has exactly one length",
    reads=(_EPOCHS, _STEPS),
    sources=("this product's API",),
    holds_for=OURS,
)
def epochs_or_max_steps(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if (training.epochs is None) != (training.max_steps is None):
        return None
    if training.epochs is None:
        return Problem(
            field=_EPOCHS,
            value=None,
            message="neither epochs nor maxSteps says how long to train, and no length fits all data",
            fix=f"set {_EPOCHS} (passes over the data) or {_STEPS} (optimizer steps)",
            changes={_EPOCHS: 1},
        )
    return Problem(
        field=_EPOCHS,
        value=training.epochs,
        message=f"epochs ({training.epochs}) and maxSteps ({training.max_steps}) both say how long to train",
        fix=f"remove {_EPOCHS} or {_STEPS}",
        changes={_EPOCHS: None},
    )


@rule(
    "warmup-ratio-range",
    "The warm-up is a share of the steps",
    reads=(_WARMUP,),
    sources=("this product's API",),
    holds_for=OURS,
)
def warmup_ratio_range(context: RuleContext) -> Problem | None:
    written = context.spec.training.warmup_ratio
    if written is None or Decimal(written) < 1:
        return None
    return Problem(
        field=_WARMUP,
        value=written,
        message="the warm-up is a share of all steps and must be below 1, or the learning rate never reaches its peak",
        fix=f'write a share such as "0.03", or remove {_WARMUP}',
        changes={_WARMUP: None},
    )


@rule(
    "decay-ratio-range",
    "The decay is a share of the steps",
    reads=(_DECAY,),
    sources=("this product's API",),
    holds_for=OURS,
)
def decay_ratio_range(context: RuleContext) -> Problem | None:
    written = context.spec.training.decay_ratio
    if written is None or Decimal(written) <= 1:
        return None
    return Problem(
        field=_DECAY,
        value=written,
        message="the decay is a share of all steps and can be at most 1",
        fix=f'write a share such as "0.2", or remove {_DECAY}',
        changes={_DECAY: None},
    )


@rule(
    "min-learning-rate-ratio-range",
    "The least learning rate is a share of the peak",
    reads=(_LEAST,),
    sources=("this product's API",),
    holds_for=OURS,
)
def min_learning_rate_ratio_range(context: RuleContext) -> Problem | None:
    written = context.spec.training.min_learning_rate_ratio
    if written is None or Decimal(written) <= 1:
        return None
    return Problem(
        field=_LEAST,
        value=written,
        message="the learning rate would rise after the warm-up, above the peak that learningRate names",
        fix=f'write a share of learningRate such as "0.1", or remove {_LEAST}',
        changes={_LEAST: None},
    )


@rule(
    "no-effect-decay-ratio",
    "Only WarmupStableDecay has a decay of its own length",
    severity="warning",
    reads=(_DECAY, _SCHEDULER),
    sources=("this product's API",),
    holds_for=OURS,
)
def no_effect_decay_ratio(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if training.decay_ratio is None or training.scheduler is Scheduler.WARMUP_STABLE_DECAY:
        return None
    return Problem(
        field=_DECAY,
        value=training.decay_ratio,
        message="NoEffect: all other schedules fall over all steps after the warm-up, or not at all",
        fix=f"set {_SCHEDULER} to {Scheduler.WARMUP_STABLE_DECAY}, or remove {_DECAY}",
        changes={_DECAY: None},
    )


@rule(
    "no-effect-min-learning-rate-ratio",
    "A constant learning rate has no least value",
    severity="warning",
    reads=(_LEAST, _SCHEDULER),
    sources=("this product's API",),
    holds_for=OURS,
)
def no_effect_min_learning_rate_ratio(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if training.min_learning_rate_ratio is None or training.scheduler is not Scheduler.CONSTANT:
        return None
    return Problem(
        field=_LEAST,
        value=training.min_learning_rate_ratio,
        message="NoEffect: the rate stays at its peak after the warm-up",
        fix=f"set {_SCHEDULER} to one that falls, or remove {_LEAST}",
        changes={_LEAST: None},
    )


@rule(
    "learning-rate-zero",
    "A learning rate of 0 trains nothing",
    reads=(_RATE,),
    sources=("AdamW: every update is a multiple of the learning rate",),
    holds_for="every version",
)
def learning_rate_zero(context: RuleContext) -> Problem | None:
    written = context.spec.training.learning_rate
    if written is None or float(written) > 0:
        return None
    return Problem(
        field=_RATE,
        value=written,
        message="no weight would change",
        fix=f'write a rate such as "2e-4", or remove {_RATE}',
        changes={_RATE: None},
    )


@rule(
    "both-activation-checkpointings",
    "Activations cannot be recomputed twice",
    reads=(_RECOMPUTE, _FSDP_RECOMPUTE),
    sources=("transformers: trainer.py refuses fsdp_config.activation_checkpointing beside the training argument",),
    holds_for="transformers >= 4.30",
)
def both_activation_checkpointings(context: RuleContext) -> Problem | None:
    spec = context.spec
    if not spec.parallelism.fsdp.activation_checkpointing:
        return None
    if spec.training.activation_checkpointing is not ActivationCheckpointing.FULL:
        return None
    return Problem(
        field=_FSDP_RECOMPUTE,
        value=True,
        message=f"{_RECOMPUTE} already asks for recomputation; done twice, it costs another forward pass and an extra all-gather",
        fix=f"remove {_FSDP_RECOMPUTE}",
        changes={_FSDP_RECOMPUTE: None},
    )


RULES = (
    epochs_or_max_steps,
    warmup_ratio_range,
    decay_ratio_range,
    min_learning_rate_ratio_range,
    no_effect_decay_ratio,
    no_effect_min_learning_rate_ratio,
    learning_rate_zero,
    both_activation_checkpointings,
)

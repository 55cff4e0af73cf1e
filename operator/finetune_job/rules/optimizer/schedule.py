"""Length of the run and learning rate."""

from __future__ import annotations

from finetune_job.api.training import Scheduler
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule
from finetune_job.rules.rule import Reproduction

_EPOCHS = "training.epochs"
_STEPS = "training.maxSteps"
_WARMUP = "training.warmupRatio"
_DECAY = "training.decayRatio"
_LEAST = "training.minLearningRateRatio"
_SCHEDULER = "training.scheduler"
_RATE = "training.learningRate"
_RATIO = "method.lora.loraPlusRatio"


@rule(
    "epochs-or-max-steps",
    "A run has exactly one length",
    reads=(_EPOCHS, _STEPS),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_schedules.py::test_one_of_two_lengths_is_ignored",
        "no error: maxSteps wins without a word; without either the run has no step",
    ),
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
    reproduction=Reproduction(
        "tests/pitfalls/test_schedules.py::test_a_run_that_only_warms_up",
        "no error: transformers' rate ends below its peak; this trainer's rises until the last steps and never falls",
    ),
    holds_for=OURS,
)
def warmup_ratio_range(context: RuleContext) -> Problem | None:
    written = context.spec.training.warmup_ratio
    if written is None or float(written) < 1:
        return None
    return Problem(
        field=_WARMUP,
        value=written,
        message="the warm-up is a share of all steps; at 1 the learning rate rises to the last step and the schedule never begins",
        fix=f'write a share such as "0.03", or remove {_WARMUP}',
        changes={_WARMUP: None},
    )


@rule(
    "decay-ratio-range",
    "The decay is a share of the steps",
    reads=(_DECAY,),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_schedules.py::test_a_decay_longer_than_the_run",
        "no error: transformers' rate never rises above 0.6 of its peak; this trainer's falls from the first step on",
    ),
    holds_for=OURS,
)
def decay_ratio_range(context: RuleContext) -> Problem | None:
    written = context.spec.training.decay_ratio
    if written is None or float(written) <= 1:
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
    reproduction=Reproduction(
        "tests/pitfalls/test_schedules.py::test_a_least_rate_above_the_peak",
        "no error: the rate rises to twice the peak, in transformers and here",
    ),
    holds_for=OURS,
)
def min_learning_rate_ratio_range(context: RuleContext) -> Problem | None:
    written = context.spec.training.min_learning_rate_ratio
    if written is None or float(written) <= 1:
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
    reproduction=Reproduction(
        "tests/pitfalls/test_schedules.py::test_settings_that_a_schedule_does_not_look_at",
        "no error: the rates of all steps are the same with and without it",
    ),
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
    reproduction=Reproduction(
        "tests/pitfalls/test_schedules.py::test_settings_that_a_schedule_does_not_look_at",
        "no error: the rates of all steps are the same with and without it",
    ),
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
    reproduction=Reproduction(
        "tests/pitfalls/test_schedules.py::test_nothing_changes_at_a_rate_of_0",
        "no error: the weights never change",
    ),
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
    "lora-plus-ratio-range",
    "LoRA+ lets B learn faster than A",
    reads=(_RATIO,),
    sources=("Hayou, Ghosh and Yu 2024, LoRA+: efficient low rank adaptation of large models",),
    reproduction=Reproduction(
        "tests/pitfalls/test_optimizer_settings.py::test_lora_b_learns_slower_below_a_ratio_of_1",
        "no error: the loss is higher after the same steps than without it",
    ),
    holds_for="every version",
)
def lora_plus_ratio_range(context: RuleContext) -> Problem | None:
    lora = context.spec.method.lora
    written = None if lora is None else lora.lora_plus_ratio
    if written is None or float(written) >= 1:
        return None
    return Problem(
        field=_RATIO,
        value=written,
        message="it is the learning rate of lora_B as a multiple of lora_A's; below 1, B, which starts at zero, would learn slower",
        fix=f'write a ratio such as "16", or remove {_RATIO}',
        changes={_RATIO: None},
    )


RULES = (
    epochs_or_max_steps,
    warmup_ratio_range,
    decay_ratio_range,
    min_learning_rate_ratio_range,
    no_effect_decay_ratio,
    no_effect_min_learning_rate_ratio,
    learning_rate_zero,
    lora_plus_ratio_range,
)

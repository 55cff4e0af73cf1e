"""Length of the run, learning rate, and settings of the optimizer: moments and epsilon."""

from __future__ import annotations

from decimal import Decimal

from finetune_job.api.training import OptimizerName, Scheduler
from finetune_job.plan.resolve_training import USUAL_LEARNING_RATES, USUAL_SGD_LEARNING_RATE
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import (
    ABOVE_0,
    AT_MOST_1,
    BELOW_1,
    Bounds,
    NoEffect,
    Range,
    Unusual,
    no_effect_rules,
    range_rules,
    unusual_rules,
)

_EPOCHS = "training.epochs"
_STEPS = "training.maxSteps"
_WARMUP, _DECAY = "training.warmupRatio", "training.decayRatio"
_LEAST = "training.minLearningRateRatio"
_SCHEDULER = "training.scheduler"
_SAME_RATES = "no error: the rates of all steps are the same with and without it"
_TESTS = "tests/pitfalls/test_schedules.py"
_OPTIMIZER = "training.optimizer"
_BETAS = ("training.adamBeta1", "training.adamBeta2")
_EPSILON = "training.adamEpsilon"
_MOMENTUM = "training.momentum"
_SMALLEST = 1.2e-38
"""Below float32's smallest normal number a device may take a number for zero."""
_MOMENT_TESTS = "tests/pitfalls/test_optimizer_settings.py"


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
    "decay-within-warmup",
    "Warm-up and decay share the steps of a run",
    severity="warning",
    reads=(_WARMUP, _DECAY, _SCHEDULER),
    sources=("transformers: transformers/optimization.py, get_wsd_schedule", "this product's API"),
    reproduction=Reproduction(
        f"{_TESTS}::test_a_warmup_and_a_decay_longer_than_the_run",
        "no error: transformers' rate drops after the warm-up; this trainer's decay has the steps that the warm-up leaves",
    ),
    holds_for=OURS,
)
def decay_within_warmup(context: RuleContext) -> Problem | None:
    training = context.plan.training
    # As they are written: 0.7 + 0.3 is not 1 in floats.
    warmup, decay = Decimal(str(training.warmup_ratio)), Decimal(str(training.decay_ratio))
    if training.scheduler is not Scheduler.WARMUP_STABLE_DECAY or warmup + decay <= 1 or warmup >= 1 or decay > 1:
        return None
    left = 1 - warmup
    return Problem(
        field=_DECAY,
        value=f"{decay:f}",
        message=f"with a warm-up of {warmup:f} (training.warmupRatio) the decay has {left:f} of the steps and no more",
        fix=f'write at most "{left:f}", or lower {_WARMUP}',
        changes={_DECAY: f"{left:f}"},
    )


SCHEDULE_RANGES = (
    Range(
        "warmup-ratio-range",
        "The warm-up is a share of the steps",
        (_WARMUP,),
        BELOW_1,
        "the warm-up is a share of all steps; at 1 the learning rate rises to the last step and the schedule never begins",
        'a share such as "0.03"',
        ("this product's API",),
        OURS,
        Reproduction(
            f"{_TESTS}::test_a_run_that_only_warms_up",
            "no error: transformers' rate ends below its peak; this trainer's rises until the last steps and never falls",
        ),
    ),
    Range(
        "decay-ratio-range",
        "The decay is a share of the steps",
        (_DECAY,),
        AT_MOST_1,
        "the decay is a share of all steps and can be at most 1",
        'a share such as "0.2"',
        ("this product's API",),
        OURS,
        Reproduction(
            f"{_TESTS}::test_a_decay_longer_than_the_run",
            "no error: transformers' rate never rises above 0.6 of its peak; this trainer's falls from the first step on",
        ),
    ),
    Range(
        "min-learning-rate-ratio-range",
        "The least learning rate is a share of the peak",
        (_LEAST,),
        AT_MOST_1,
        "the learning rate would rise after the warm-up, above the peak that learningRate names",
        'a share of learningRate such as "0.1"',
        ("this product's API",),
        OURS,
        Reproduction(
            f"{_TESTS}::test_a_least_rate_above_the_peak",
            "no error: the rate rises to twice the peak, in transformers and here",
        ),
    ),
    Range(
        "learning-rate-zero",
        "A learning rate of 0 trains nothing",
        ("training.learningRate",),
        ABOVE_0,
        "no weight would change",
        # The API server says the same, which tells no methods apart.
        f'a usual rate: "{USUAL_LEARNING_RATES[False]}" for adapters, "{USUAL_LEARNING_RATES[True]}" for Full, '
        f'"{USUAL_SGD_LEARNING_RATE}" for SGD',
        ("AdamW: every update is a multiple of the learning rate",),
        "every version",
        Reproduction(f"{_TESTS}::test_nothing_changes_at_a_rate_of_0", "no error: the weights never change"),
    ),
)
UNUSUAL = (
    Unusual(
        "warmup-ratio-unusual",
        "A warm-up leaves most of the run",
        _WARMUP,
        Bounds((("<=", 0.5),)),
        BELOW_1,
        "the learning rate still rises in more than half of the steps, and most of them train with less than was chosen",
        'a usual share, from "0" to "0.1"',
        ("QLoRA's repository, artidoro/qlora: scripts/finetune_guanaco_7b.sh (warmup_ratio 0.03)",),
        "it still trains, with smaller steps than were chosen",
    ),
    Unusual(
        "weight-decay-unusual",
        "Weight decay is a small number",
        "training.weightDecay",
        AT_MOST_1,
        Bounds(()),
        "each step multiplies what is trained by 1 - rate x decay, and above 1 this pull to 0 outweighs what most data teaches",
        'a usual decay, from "0" to "0.1"',
        (
            "QLoRA's repository, artidoro/qlora: scripts/finetune_guanaco_7b.sh (weight_decay 0.0)",
            "Touvron et al., 2023, Llama 2, section 3: a decay of 0.1 where all weights are trained",
        ),
        "the tests' runs are too short for a decay that erases nothing at once",
    ),
)
SCHEDULE_NO_EFFECT = (
    NoEffect(
        "no-effect-decay-ratio",
        "Only WarmupStableDecay has a decay of its own length",
        (_DECAY,),
        (_SCHEDULER,),
        lambda context: context.spec.training.scheduler is not Scheduler.WARMUP_STABLE_DECAY,
        "all other schedules fall over all steps after the warm-up, or not at all",
        Reproduction(f"{_TESTS}::test_settings_that_a_schedule_does_not_look_at", _SAME_RATES),
        f"set {_SCHEDULER} to {Scheduler.WARMUP_STABLE_DECAY}",
    ),
    NoEffect(
        "no-effect-min-learning-rate-ratio",
        "A constant learning rate has no least value",
        (_LEAST,),
        (_SCHEDULER,),
        lambda context: context.spec.training.scheduler is Scheduler.CONSTANT,
        "the rate stays at its peak after the warm-up",
        Reproduction(f"{_TESTS}::test_settings_that_a_schedule_does_not_look_at", _SAME_RATES),
        f"set {_SCHEDULER} to one that falls",
    ),
)
SCHEDULE_RULES = (
    epochs_or_max_steps,
    *range_rules(__name__, SCHEDULE_RANGES),
    *unusual_rules(__name__, UNUSUAL),
    decay_within_warmup,
    *no_effect_rules(__name__, SCHEDULE_NO_EFFECT),
)


MOMENT_RANGES = (
    Range(
        "adam-beta-range",
        "A decay of moments stays below 1",
        _BETAS,
        BELOW_1,
        "at 1 and above the moments forget nothing and take up nothing new; torch refuses it",
        'a number below 1 such as "0.9" or "0.999"',
        ("torch: torch/optim/adamw.py, AdamW.__init__",),
        "every version",
        Reproduction(f"{_MOMENT_TESTS}::test_moments_that_never_fade_are_refused_by_torch", "ValueError: Invalid beta parameter"),
    ),
    Range(
        "adam-epsilon-zero",
        "Adam needs a positive epsilon",
        (_EPSILON,),
        Bounds(((">=", _SMALLEST),)),
        "a gradient that is exactly zero, as that of lora_A is at the first step, gives 0 / 0, and the weights become NaN",
        'a small number such as "1e-8"',
        ("Kingma and Ba, 2015, Adam: the update is m / (sqrt(v) + epsilon)", "PEFT: lora_B starts at zero"),
        "every version",
        Reproduction(
            f"{_MOMENT_TESTS}::test_an_epsilon_of_0_divides_0_by_0",
            "the weights are NaN after the first steps, without an exception of torch",
        ),
    ),
    Range(
        "momentum-range",
        "Momentum stays below 1",
        (_MOMENTUM,),
        BELOW_1,
        "at 1 and above the sum of past gradients never fades, and the steps grow without bound",
        'a number below 1 such as "0.9"',
        ("Sutskever et al., 2013, On the importance of initialization and momentum in deep learning",),
        "every version",
        Reproduction(
            f"{_MOMENT_TESTS}::test_momentum_of_1_grows_without_bound",
            "no error: under a constant gradient the n-th step is n times the first",
        ),
    ),
)
MOMENT_NO_EFFECT = (
    NoEffect(
        "no-effect-momentum",
        "Only SGD has a momentum of its own",
        (_MOMENTUM,),
        (_OPTIMIZER,),
        lambda context: context.spec.training.optimizer is not OptimizerName.SGD,
        "the first moment of AdamW and RAdam is governed by adamBeta1",
        Reproduction(
            f"{_MOMENT_TESTS}::test_settings_that_an_optimizer_does_not_have",
            "no error: the trained weights are the same with and without it",
        ),
        f"set {_BETAS[0]}, or {_OPTIMIZER} to {OptimizerName.SGD}",
    ),
    NoEffect(
        "no-effect-adam-settings",
        "SGD has no betas and no epsilon",
        (*_BETAS, _EPSILON),
        (_OPTIMIZER,),
        lambda context: context.spec.training.optimizer is OptimizerName.SGD,
        "SGD keeps no such moments",
        Reproduction(
            f"{_MOMENT_TESTS}::test_settings_that_an_optimizer_does_not_have",
            "no error: the trained weights are the same with and without them",
        ),
        f"set {_MOMENTUM}, or {_OPTIMIZER} to {OptimizerName.ADAMW}",
    ),
)
MOMENT_RULES = (*range_rules(__name__, MOMENT_RANGES), *no_effect_rules(__name__, MOMENT_NO_EFFECT))

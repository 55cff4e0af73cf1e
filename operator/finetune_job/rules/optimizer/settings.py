"""Rules on the length of the run, the learning rate, and the optimizer's moments and epsilon."""

from __future__ import annotations

from decimal import Decimal

from finetune_job.api.training import OptimizerName, Scheduler
from finetune_job.rules.rule import Problem, RuleContext, rule

_EPOCHS = "training.epochs"
_STEPS = "training.maxSteps"
_WARMUP, _DECAY = "training.warmupRatio", "training.decayRatio"


@rule("epochs-or-max-steps")
def epochs_or_max_steps(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if (training.epochs is None) != (training.max_steps is None):
        return None
    if training.epochs is None:
        return Problem(
            value=None,
            message="neither epochs nor maxSteps says how long to train, and no length fits all data",
            fix=f"set {_EPOCHS} (passes over the data) or {_STEPS} (optimizer steps)",
            changes={_EPOCHS: 1},
        )
    return Problem(
        value=training.epochs,
        message=f"epochs ({training.epochs}) and maxSteps ({training.max_steps}) both say how long to train",
        fix=f"remove {_EPOCHS} or {_STEPS}",
    )


@rule("decay-within-warmup")
def decay_within_warmup(context: RuleContext) -> Problem | None:
    training = context.plan.training
    # Add the decimal numbers as written, because a sum of floats may miss 1 by rounding.
    warmup, decay = Decimal(str(training.warmup_ratio)), Decimal(str(training.decay_ratio))
    if training.scheduler is not Scheduler.WARMUP_STABLE_DECAY or warmup + decay <= 1 or warmup >= 1 or decay > 1:
        return None
    left = 1 - warmup
    return Problem(
        value=f"{decay:f}",
        message=f"with a warm-up of {warmup:f} (training.warmupRatio) only {left:f} of the steps are left for the decay",
        fix=f'write at most "{left:f}", or lower {_WARMUP}',
        field=_DECAY,
        changes={_DECAY: f"{left:f}"},
    )


rule("no-effect-decay-ratio")(lambda context: context.spec.training.scheduler is not Scheduler.WARMUP_STABLE_DECAY)
rule("no-effect-min-learning-rate-ratio")(lambda context: context.spec.training.scheduler is Scheduler.CONSTANT)


rule("no-effect-momentum")(lambda context: context.spec.training.optimizer is not OptimizerName.SGD)
rule("no-effect-adam-settings")(lambda context: context.spec.training.optimizer is OptimizerName.SGD)

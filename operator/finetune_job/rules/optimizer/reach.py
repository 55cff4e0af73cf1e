"""How far a run can move what it trains: settings that are fine by their range, and together leave every weight or none."""

from __future__ import annotations

import math

from finetune_job.api.method import MethodType
from finetune_job.api.training import OptimizerName
from finetune_job.plan.run_plan import RunPlan, TrainingPlan
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule

_RATE, _NORM, _EPSILON = "training.learningRate", "training.maxGradNorm", "training.adamEpsilon"
_DECAY, _STEPS = "training.weightDecay", "training.maxSteps"
_OPTIMIZER, _MOMENTUM = "training.optimizer", "training.momentum"
_RATIO, _ALPHA = "method.lora.loraPlusRatio", "method.lora.loraAlpha"
_BETAS = ("training.adamBeta1", "training.adamBeta2")

_LEAST_REACH = 1e-10
"""Float32's steps at a weight of 0.02 are 1.9e-9, and bfloat16's are 65536 times that; an adapter's other factor makes
less of what moves."""
_LONGEST_RUN = 100_000
"""Steps of a run whose length only the data tells."""
_LARGEST_GRADIENT = 1e4
"""Norm of a gradient that nothing clips."""


@rule(
    "training-moves-nothing",
    "A run has to move some weight",
    reads=(_RATE, _NORM, _EPSILON, _STEPS, _OPTIMIZER, _MOMENTUM, *_BETAS, _DECAY, _RATIO, _ALPHA, "method.type"),
    sources=(
        "Kingma and Ba, 2015, Adam, section 2.1: a step is at most about the rate, and at most gradient / epsilon times it",
        "IEEE 754: a float32 number near 0.02 has steps of 1.9e-9",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_results.py::test_steps_too_small_to_be_seen",
        "VerificationError, after the training: the merged model has the base model's weights in every tensor",
    ),
    holds_for="every version",
)
def training_moves_nothing(context: RuleContext) -> Problem | None:
    plan = context.plan
    training = plan.training
    # A rate of 0 has a rule of its own; of moments beyond their range nothing can be said.
    if training.learning_rate == 0 or training.momentum >= 1 or max(training.adam_betas) >= 1 or training.adam_epsilon == 0:
        return None
    reach = _reach(plan, training)
    if reach >= _LEAST_REACH:
        return None
    spec = context.spec.training
    written = {
        field: value
        for field, value in ((_RATE, spec.learning_rate), (_NORM, spec.max_grad_norm), (_EPSILON, spec.adam_epsilon))
        if value is not None and not (field == _EPSILON and training.optimizer is OptimizerName.SGD)
    }
    usual = {"learning_rate": (_RATE, 2e-5), "max_grad_norm": (_NORM, 1.0), "adam_epsilon": (_EPSILON, 1e-8)}
    # The one whose usual value lets the weights move furthest.
    fields = {field: _reach(plan, training.model_copy(update={name: value})) for name, (field, value) in usual.items()}
    field = max(written, key=fields.__getitem__, default=_RATE)
    changes = dict.fromkeys([field] if fields[field] >= _LEAST_REACH else written)
    return Problem(
        field=field,
        value=written.get(field),
        message=f"with these steps, rate and gradients no trained value can change by more than {reach:.0e} in the whole run, "
        "which is lost where weights are stored: the result would be the base model, and its merge may fail its verification",
        fix=f'remove {" and ".join(changes)}, or write usual values: a rate such as "2e-4", a norm of "1.0", an epsilon of '
        '"1e-8"',
        changes=changes,
    )


def _reach(plan: RunPlan, training: TrainingPlan) -> float:
    """Most by which a run changes a value of a weight: a bound, not an estimate. An adapter's values are multiplied by alpha."""
    lora, is_full = plan.method.lora, plan.method.type is MethodType.FULL
    factor = (
        1.0 if lora is None else max(lora.lora_alpha, *lora.alpha_pattern.values(), 1) * max(lora.lora_plus_ratio or 1.0, 1.0)
    )
    steps = training.max_steps or _LONGEST_RUN
    return steps * training.learning_rate * (_largest_step(training) * factor + (training.weight_decay if is_full else 0.0))


def _largest_step(training: TrainingPlan) -> float:
    """As a multiple of the learning rate, without weight decay."""
    gradient = training.max_grad_norm or _LARGEST_GRADIENT
    beta1, beta2 = training.adam_betas
    # Kingma and Ba: the bound for a gradient that was zero at all steps but this one.
    normalised = min(max(1.0, (1 - beta1) / math.sqrt(1 - beta2)), gradient / training.adam_epsilon)
    match training.optimizer:
        case OptimizerName.ADAMW:
            return normalised
        case OptimizerName.RADAM:
            # Its first steps are those of plain momentum.
            return max(normalised, gradient)
        case OptimizerName.SGD:
            return gradient / (1 - training.momentum)


@rule(
    "weight-decay-erases",
    "Weight decay takes a part of each weight",
    reads=(_DECAY, _RATE, _RATIO, "method.type"),
    sources=("Loshchilov and Hutter, 2019, Decoupled weight decay regularization: a weight is multiplied by 1 - rate x decay",),
    reproduction=Reproduction(
        "tests/pitfalls/test_optimizer_settings.py::test_decay_of_one_over_the_rate_erases_the_weights",
        "no error: after a step nothing is left of the weights of before but the step itself",
    ),
    holds_for=OURS,
)
def weight_decay_erases(context: RuleContext) -> Problem | None:
    plan = context.plan
    training, lora = plan.training, plan.method.lora
    rate = training.learning_rate * max((lora.lora_plus_ratio if lora else None) or 1.0, 1.0)
    taken = rate * training.weight_decay
    if taken < 1:
        return None
    return Problem(
        field=_DECAY,
        value=context.spec.training.weight_decay,
        message=f"each step multiplies the weights by 1 - rate x decay, which is {1 - taken:g} at a rate of {rate:g}: all that "
        "was in them before is erased, or grows with alternating sign",
        fix=f'write a decay such as "0.01", or remove {_DECAY}',
        changes={_DECAY: None},
    )


RULES = (training_moves_nothing, weight_decay_erases)

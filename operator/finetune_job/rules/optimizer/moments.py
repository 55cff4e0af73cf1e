"""Settings of the optimizer: moments and epsilon."""

from __future__ import annotations

from finetune_job.api.training import OptimizerName
from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule
from finetune_job.rules.rule import Reproduction

_OPTIMIZER = "training.optimizer"
_BETAS = ("training.adamBeta1", "training.adamBeta2")
_EPSILON = "training.adamEpsilon"
_MOMENTUM = "training.momentum"
_SMALLEST = 1.2e-38
"""Below float32's smallest normal number a device may take a number for zero."""


@rule(
    "adam-beta-range",
    "A decay of moments stays below 1",
    reads=_BETAS,
    sources=("torch: torch/optim/adamw.py, AdamW.__init__",),
    reproduction=Reproduction(
        "tests/pitfalls/test_optimizer_settings.py::test_moments_that_never_fade_are_refused_by_torch",
        "ValueError: Invalid beta parameter",
    ),
    holds_for="every version",
)
def adam_beta_range(context: RuleContext) -> Problem | None:
    training = context.spec.training
    written = dict(zip(_BETAS, (training.adam_beta1, training.adam_beta2), strict=True))
    wrong = {field: value for field, value in written.items() if value is not None and float(value) >= 1}
    if not wrong:
        return None
    field, value = next(iter(wrong.items()))
    return Problem(
        field=field,
        value=value,
        message="at 1 and above the moments forget nothing and take up nothing new; torch refuses it",
        fix=f'write a number below 1 such as "0.9" or "0.999", or remove {field}',
        changes=dict.fromkeys(wrong),
    )


@rule(
    "adam-epsilon-zero",
    "Adam needs a positive epsilon",
    reads=(_EPSILON,),
    sources=("Kingma and Ba, 2015, Adam: the update is m / (sqrt(v) + epsilon)", "PEFT: lora_B starts at zero"),
    reproduction=Reproduction(
        "tests/pitfalls/test_optimizer_settings.py::test_an_epsilon_of_0_divides_0_by_0",
        "the weights are NaN after the first steps, without an exception of torch",
    ),
    holds_for="every version",
)
def adam_epsilon_zero(context: RuleContext) -> Problem | None:
    written = context.spec.training.adam_epsilon
    if written is None or float(written) >= _SMALLEST:
        return None
    return Problem(
        field=_EPSILON,
        value=written,
        message="a gradient that is exactly zero, as that of lora_A is at the first step, gives 0 / 0, and the weights become NaN",
        fix=f'write a small number such as "1e-8", or remove {_EPSILON}',
        changes={_EPSILON: None},
    )


@rule(
    "momentum-range",
    "Momentum stays below 1",
    reads=(_MOMENTUM,),
    sources=("Sutskever et al., 2013, On the importance of initialization and momentum in deep learning",),
    reproduction=Reproduction(
        "tests/pitfalls/test_optimizer_settings.py::test_momentum_of_1_grows_without_bound",
        "no error: under a constant gradient the n-th step is n times the first",
    ),
    holds_for="every version",
)
def momentum_range(context: RuleContext) -> Problem | None:
    written = context.spec.training.momentum
    if written is None or float(written) < 1:
        return None
    return Problem(
        field=_MOMENTUM,
        value=written,
        message="at 1 and above the sum of past gradients never fades, and the steps grow without bound",
        fix=f'write a number below 1 such as "0.9", or remove {_MOMENTUM}',
        changes={_MOMENTUM: None},
    )


@rule(
    "no-effect-momentum",
    "Only SGD has a momentum of its own",
    severity="warning",
    reads=(_MOMENTUM, _OPTIMIZER),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_optimizer_settings.py::test_settings_that_an_optimizer_does_not_have",
        "no error: the trained weights are the same with and without it",
    ),
    holds_for=OURS,
)
def no_effect_momentum(context: RuleContext) -> Problem | None:
    training = context.spec.training
    if training.momentum is None or training.optimizer is OptimizerName.SGD:
        return None
    return Problem(
        field=_MOMENTUM,
        value=training.momentum,
        message="NoEffect: the first moment of AdamW and RAdam is governed by adamBeta1",
        fix=f"set {_BETAS[0]}, or {_OPTIMIZER} to {OptimizerName.SGD}, or remove {_MOMENTUM}",
        changes={_MOMENTUM: None},
    )


@rule(
    "no-effect-adam-settings",
    "SGD has no betas and no epsilon",
    severity="warning",
    reads=(*_BETAS, _EPSILON, _OPTIMIZER),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_optimizer_settings.py::test_settings_that_an_optimizer_does_not_have",
        "no error: the trained weights are the same with and without them",
    ),
    holds_for=OURS,
)
def no_effect_adam_settings(context: RuleContext) -> Problem | None:
    training = context.spec.training
    written = dict(zip((*_BETAS, _EPSILON), (training.adam_beta1, training.adam_beta2, training.adam_epsilon), strict=True))
    unused = [field for field, value in written.items() if value is not None]
    if training.optimizer is not OptimizerName.SGD or not unused:
        return None
    return Problem(
        field=unused[0],
        value=written[unused[0]],
        message="NoEffect: SGD keeps no such moments",
        fix=f"set {_MOMENTUM}, or {_OPTIMIZER} to {OptimizerName.ADAMW}, or remove {', '.join(unused)}",
        changes=dict.fromkeys(unused),
    )


RULES = (
    adam_beta_range,
    adam_epsilon_zero,
    momentum_range,
    no_effect_momentum,
    no_effect_adam_settings,
)

"""Settings of the optimizer: moments and epsilon."""

from __future__ import annotations

from finetune_job.api.training import OptimizerName
from finetune_job.rules.no_effect import NoEffect, no_effect_rules
from finetune_job.rules.ranges import BELOW_1, Bounds, Range, range_rules
from finetune_job.rules.rule import Reproduction

_OPTIMIZER = "training.optimizer"
_BETAS = ("training.adamBeta1", "training.adamBeta2")
_EPSILON = "training.adamEpsilon"
_MOMENTUM = "training.momentum"
_SMALLEST = 1.2e-38
"""Below float32's smallest normal number a device may take a number for zero."""
_TESTS = "tests/pitfalls/test_optimizer_settings.py"

RANGES = (
    Range(
        "adam-beta-range",
        "A decay of moments stays below 1",
        _BETAS,
        BELOW_1,
        "at 1 and above the moments forget nothing and take up nothing new; torch refuses it",
        'a number below 1 such as "0.9" or "0.999"',
        ("torch: torch/optim/adamw.py, AdamW.__init__",),
        "every version",
        Reproduction(f"{_TESTS}::test_moments_that_never_fade_are_refused_by_torch", "ValueError: Invalid beta parameter"),
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
            f"{_TESTS}::test_an_epsilon_of_0_divides_0_by_0",
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
            f"{_TESTS}::test_momentum_of_1_grows_without_bound",
            "no error: under a constant gradient the n-th step is n times the first",
        ),
    ),
)
NO_EFFECT = (
    NoEffect(
        "no-effect-momentum",
        "Only SGD has a momentum of its own",
        (_MOMENTUM,),
        (_OPTIMIZER,),
        lambda context: context.spec.training.optimizer is not OptimizerName.SGD,
        "the first moment of AdamW and RAdam is governed by adamBeta1",
        Reproduction(
            f"{_TESTS}::test_settings_that_an_optimizer_does_not_have",
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
            f"{_TESTS}::test_settings_that_an_optimizer_does_not_have",
            "no error: the trained weights are the same with and without them",
        ),
        f"set {_MOMENTUM}, or {_OPTIMIZER} to {OptimizerName.ADAMW}",
    ),
)
RULES = (*range_rules(__name__, RANGES), *no_effect_rules(__name__, NO_EFFECT))

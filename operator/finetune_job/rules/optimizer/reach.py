"""Rules on how far a run can move weights: settings that are each in range, but together change nothing or destroy the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetune_job.api.method import MethodType
from finetune_job.api.training import OptimizerName
from finetune_job.method_settings import effective_settings
from finetune_job.plan.method_plan import LoraPlan, MethodPlan
from finetune_job.plan.resolve_training import USUAL_LEARNING_RATES, USUAL_SGD_LEARNING_RATE
from finetune_job.plan.run_plan import RunPlan, TrainingPlan
from finetune_job.rules.rule import Problem, RuleContext, rule

_RATE, _NORM, _EPSILON = "training.learningRate", "training.maxGradNorm", "training.adamEpsilon"
_DECAY = "training.weightDecay"
_RATIO, _ALPHA = "method.lora.loraPlusRatio", "method.lora.loraAlpha"
_PATTERN, _RANKS = "method.lora.alphaPattern", "method.lora.rankPattern"
_SETTINGS = "method.settings"
_SETTINGS_ALPHA = f"{_SETTINGS}.alpha"

_LEAST_REACH = 1e-10
"""Smallest useful reach, the total change of a weight in a run. Near 0.02, adjacent float32 numbers are 1.9e-9 apart, bfloat16
numbers 65536 times that; an adapter's other factor reduces the change further."""
_LONGEST_RUN = 100_000
"""Assumed number of steps of a run whose length depends on the data."""
_LARGEST_STEP = 1.0
"""Largest useful step: fifty times a typical weight. With 4,096 channels, an adapter's other factor divides it by a hundred."""
_FULL_STEP = 10.0
"""Weight of a step on the model's own weights relative to a step on a factor of an adapter."""


@dataclass(frozen=True)
class _Rates:
    """The usual learning rates for one kind of run."""

    least: float
    proposed: str
    words: str
    slip_above: float
    """Rate above which the setting is most likely a mistake, or training diverges."""

    @property
    def slip_below(self) -> float:
        """Rate below which no run of usual length learns anything, because each step is about as large as the rate."""
        return self.least / 1000


_FULL_RATES = _Rates(1e-6, USUAL_LEARNING_RATES[True], '"1e-6" to "1e-4" for Full', 1e-3)
_ADAPTER_RATES = _Rates(1e-5, USUAL_LEARNING_RATES[False], '"1e-5" to "1e-3" for adapters', 1e-2)
_SGD_RATES = _Rates(0.01, USUAL_SGD_LEARNING_RATE, f'"{USUAL_SGD_LEARNING_RATE}" to "1" for SGD', 100.0)
"""Rates for SGD. Its step is the clipped gradient times the rate; the norm of all values of an adapter is of similar size."""
_LARGEST_GRADIENT = 1e4
"""Assumed gradient norm if gradients are not clipped."""


@rule("training-moves-nothing")
def training_moves_nothing(context: RuleContext) -> Problem | None:
    plan = context.plan
    training = plan.training
    reach = _known_reach(plan)
    if reach is None or reach >= _LEAST_REACH:
        return None
    spec = context.spec.training
    written = {
        field: value
        for field, value in ((_RATE, spec.learning_rate), (_NORM, spec.max_grad_norm), (_EPSILON, spec.adam_epsilon))
        if value is not None and not (field == _EPSILON and training.optimizer is OptimizerName.SGD)
    }
    usual = {"learning_rate": (_RATE, 2e-5), "max_grad_norm": (_NORM, 1.0), "adam_epsilon": (_EPSILON, 1e-8)}
    # Blame the setting whose replacement by its usual value increases the reach most.
    fields = {field: _reach(plan, training.model_copy(update={name: value})) for name, (field, value) in usual.items()}
    field = max(written, key=fields.__getitem__, default=_RATE)
    changes = dict.fromkeys([field] if fields[field] >= _LEAST_REACH else written)
    return Problem(
        value=written.get(field),
        message=f"with these steps, rate and gradients no trained value can change by more than {reach:.0e} in the whole run, "
        "less than the weights' precision: the result would be the base model, and its merge may fail its verification",
        fix=f'remove {" and ".join(changes)}, or use typical values: a rate such as "{_rates(plan).proposed}", a norm of "1.0", '
        'an epsilon of "1e-8"',
        field=field,
        changes=changes,
    )


def _known_reach(plan: RunPlan) -> float | None:
    """Return the reach; None for a rate of 0, which has its own rule, and for moments out of range, where nothing bounds it."""
    training = plan.training
    if training.learning_rate == 0 or training.momentum >= 1 or max(training.adam_betas) >= 1 or training.adam_epsilon == 0:
        return None
    return _reach(plan, training)


def _rates(plan: RunPlan) -> _Rates:
    """Return the rates for this method and optimizer."""
    if plan.training.optimizer is OptimizerName.SGD:
        return _SGD_RATES
    return _FULL_RATES if plan.method.type is MethodType.FULL else _ADAPTER_RATES


def _reach(plan: RunPlan, training: TrainingPlan) -> float:
    """Return an upper bound (not an estimate) on the change of a weight in a run, where alpha scales an adapter's values."""
    lora, is_full = plan.method.lora, plan.method.type is MethodType.FULL
    factor = (
        1.0 if lora is None else max(lora.lora_alpha, *lora.alpha_pattern.values(), 1) * max(lora.lora_plus_ratio or 1.0, 1.0)
    )
    steps = training.max_steps or _LONGEST_RUN
    return steps * training.learning_rate * (_largest_step(training) * factor + (training.weight_decay if is_full else 0.0))


def _largest_step(training: TrainingPlan) -> float:
    """Return the largest possible step as a multiple of the learning rate, without weight decay."""
    gradient = training.max_grad_norm or _LARGEST_GRADIENT
    beta1, beta2 = training.adam_betas
    # Kingma and Ba's bound for a gradient that was zero at all steps except this one.
    normalised = min(max(1.0, (1 - beta1) / math.sqrt(1 - beta2)), gradient / training.adam_epsilon)
    match training.optimizer:
        case OptimizerName.ADAMW:
            return normalised
        case OptimizerName.RADAM:
            # The first steps of RAdam are plain momentum steps.
            return max(normalised, gradient)
        case OptimizerName.SGD:
            return gradient / (1 - training.momentum)


@rule("steps-too-large")
def steps_too_large(context: RuleContext) -> Problem | None:
    plan, spec = context.plan, context.spec
    if not _overwrites(plan):
        return None
    lora = spec.method.lora
    written = {
        _RATE: spec.training.learning_rate,
        _ALPHA: lora.lora_alpha if lora else None,
        _PATTERN: lora.alpha_pattern if lora else None,
        _RANKS: lora.rank_pattern if lora else None,
        _RATIO: lora.lora_plus_ratio if lora else None,
        _SETTINGS_ALPHA: (spec.method.settings or {}).get("alpha"),
    }
    usual_rate = float(USUAL_LEARNING_RATES[False])
    usual = {
        _RATE: plan.model_copy(update={"training": plan.training.model_copy(update={"learning_rate": usual_rate})}),
        _ALPHA: _with_lora(plan, lora_alpha=2 * plan.method.lora.r if plan.method.lora else 0),
        _PATTERN: _with_lora(plan, alpha_pattern={}),
        _RANKS: _with_lora(plan, rank_pattern={}),
        _RATIO: _with_lora(plan, lora_plus_ratio=None),
        _SETTINGS_ALPHA: _without_alpha(plan),
    }
    # Blame the one setting that alone causes the problem, or else all settings in the manifest.
    alone = next((field for field, other in usual.items() if written[field] is not None and _step(other) < _LARGEST_STEP), None)
    removed = [alone] if alone else [field for field, value in written.items() if value is not None] or [_RATE]
    return Problem(
        value=written[removed[0]],
        message=f"each step moves a weight by about {_step(plan):.2g} ({_factors(plan.method)}), and weights of language models "
        "are of the order of 0.02: what the model knows is overwritten",
        fix=f"remove {' and '.join(removed)}, or use typical values: a rate from {_rates(plan).words}"
        + (", a loraAlpha of twice the rank" if plan.method.lora is not None else ""),
        field=_SETTINGS if removed[0] == _SETTINGS_ALPHA else removed[0],
        changes=dict.fromkeys(removed),
    )


def _factors(method: MethodPlan) -> str:
    """Describe in words the factors that determine the size of a step."""
    if method.lora is not None:
        return "learning rate x loraPlusRatio x the adapter's scaling"
    return "the learning rate" if method.adapter is None else "learning rate x the adapter's scaling"


def _overwrites(plan: RunPlan) -> bool:
    return plan.training.optimizer is not OptimizerName.SGD and _step(plan) >= _LARGEST_STEP


def _step(plan: RunPlan) -> float:
    """Estimate the order of magnitude by which one step of an Adam-like optimizer changes a weight."""
    rate, lora = plan.training.learning_rate, plan.method.lora
    if lora is None:
        # Unlike in LoRA, no second matrix makes the step smaller.
        return rate * (_FULL_STEP if plan.method.type is MethodType.FULL else max(_adapter_scaling(plan.method), 1.0))
    # A scaling below 1 counts as 1, because it does not keep the matrices of the adapter from being overwritten.
    return rate * (lora.lora_plus_ratio or 1.0) * max(_largest_scaling(lora), 1.0)


def _largest_scaling(lora: LoraPlan) -> float:
    """Return the largest scaling of any module: patterns may override alpha, rank, or both."""
    keys = {*lora.alpha_pattern, *lora.rank_pattern}
    of_patterns = ((lora.alpha_pattern.get(key, lora.lora_alpha), lora.rank_pattern.get(key, lora.r)) for key in keys)
    return max(
        alpha / (math.sqrt(rank) if lora.use_rslora else rank) for alpha, rank in ((lora.lora_alpha, lora.r), *of_patterns)
    )


def _adapter_scaling(method: MethodPlan) -> float:
    """Return alpha / r for methods that scale their product by it, such as LoHa and LoKr; 0 for other methods."""
    settings = effective_settings(method.type, method.adapter.settings) if method.adapter else {}
    alpha, rank = settings.get("alpha"), settings.get("r")
    return alpha / rank if isinstance(alpha, int) and isinstance(rank, int) and rank > 0 else 0.0


def _with_lora(plan: RunPlan, **changes: object) -> RunPlan:
    lora = plan.method.lora
    if lora is None:
        return plan
    return plan.model_copy(update={"method": plan.method.model_copy(update={"lora": lora.model_copy(update=changes)})})


def _without_alpha(plan: RunPlan) -> RunPlan:
    adapter = plan.method.adapter
    if adapter is None:
        return plan
    settings = {name: value for name, value in adapter.settings.items() if name != "alpha"}
    method = plan.method.model_copy(update={"adapter": adapter.model_copy(update={"settings": settings})})
    return plan.model_copy(update={"method": method})


@rule("weight-decay-erases")
def weight_decay_erases(context: RuleContext) -> Problem | None:
    plan = context.plan
    training, lora = plan.training, plan.method.lora
    rate = training.learning_rate * max((lora.lora_plus_ratio if lora else None) or 1.0, 1.0)
    taken = rate * training.weight_decay
    if taken < 1:
        return None
    return Problem(
        value=context.spec.training.weight_decay,
        message=f"each step multiplies the weights by 1 - rate x decay, which is {1 - taken:g} at a rate of {rate:g}: "
        "everything that was in them before is erased, or grows and changes its sign in each step",
        fix=f'write a decay such as "0.01", or remove {_DECAY}',
    )


@rule("learning-rate-unusual")
def learning_rate_unusual(context: RuleContext) -> Problem | None:
    plan = context.plan
    rates, rate, reach = _rates(plan), plan.training.learning_rate, _known_reach(plan)
    # Adapters other than LoRA and its variants tolerate larger rates, so the upper bound does not apply to them.
    is_bounded = rates is not _ADAPTER_RATES or plan.method.lora is not None
    if is_bounded and rate > rates.slip_above and not _overwrites(plan):
        message = (
            f"a rate of {rate:g} is above {rates.slip_above:g}, far beyond all usual rates; training would most likely "
            "diverge or unlearn"
        )
    elif rate < rates.slip_below and reach is not None and reach >= _LEAST_REACH:
        message = (
            f"a rate of {rate:g} is below {rates.slip_below:g}, a thousandth of the smallest usual rate; steps are so "
            "short that the result would most likely be the base model"
        )
    else:
        return None
    return Problem(
        value=context.spec.training.learning_rate,
        message=message,
        fix=f'write a usual rate, {rates.words}, such as "{rates.proposed}"',
        changes={_RATE: rates.proposed if rates is _SGD_RATES else None},
    )

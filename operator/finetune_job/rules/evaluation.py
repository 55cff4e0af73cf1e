"""Held-out loss, early stopping, best checkpoint."""

from __future__ import annotations

from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule

_EVERY = "evaluation.everySteps"
_STOPPING = "evaluation.earlyStopping"
_BEST = "evaluation.loadBestModelAtEnd"
_VALIDATION = "data.validation"
_API = ("this product's API",)


@rule(
    "evaluation-without-validation",
    "Evaluation needs held-out records",
    severity="warning",
    reads=(_EVERY, _VALIDATION),
    sources=_API,
    holds_for=OURS,
)
def evaluation_without_validation(context: RuleContext) -> Problem | None:
    every = context.spec.evaluation.every_steps
    if every is None or context.spec.data.validation is not None:
        return None
    return Problem(
        field=_EVERY,
        value=every,
        message="NoEffect: there are no held-out records to evaluate on",
        fix=f"set {_VALIDATION}.source, or remove {_EVERY}",
        changes={_EVERY: None},
    )


@rule(
    "early-stopping-without-evaluation",
    "Early stopping needs evaluations to go by",
    reads=(_STOPPING, _EVERY, _VALIDATION),
    sources=("transformers: trainer_callback.py, EarlyStoppingCallback.on_train_begin",),
    holds_for=OURS,
)
def early_stopping_without_evaluation(context: RuleContext) -> Problem | None:
    spec = context.spec
    missing = []
    if spec.data.validation is None:
        missing.append(f"{_VALIDATION}.source")
    if spec.evaluation.every_steps is None:
        missing.append(_EVERY)
    stopping = spec.evaluation.early_stopping
    if stopping is None or not missing:
        return None
    return Problem(
        field=_STOPPING,
        value=f"patience {stopping.patience}",
        message="without held-out records evaluated during the run there is no loss to go by: it would never stop early",
        fix=f"set {' and '.join(missing)}, or remove {_STOPPING}",
        changes={_STOPPING: None},
    )


@rule(
    "best-model-without-validation",
    "The best checkpoint is found on held-out records",
    reads=(_BEST, _VALIDATION),
    sources=_API,
    holds_for=OURS,
)
def best_model_without_validation(context: RuleContext) -> Problem | None:
    if not context.spec.evaluation.load_best_model_at_end or context.spec.data.validation is not None:
        return None
    return Problem(
        field=_BEST,
        value=True,
        message="without held-out records no checkpoint is better than another",
        fix=f"set {_VALIDATION}.source, or remove {_BEST}",
        changes={_BEST: None},
    )


@rule(
    "best-model-is-the-last",
    "One evaluation cannot choose between checkpoints",
    severity="warning",
    reads=(_BEST, _EVERY),
    sources=_API,
    holds_for=OURS,
)
def best_model_is_the_last(context: RuleContext) -> Problem | None:
    evaluation = context.spec.evaluation
    if not evaluation.load_best_model_at_end or evaluation.every_steps is not None or context.spec.data.validation is None:
        return None
    return Problem(
        field=_BEST,
        value=True,
        message=f"NoEffect: {_EVERY} is unset, so only the last checkpoint is evaluated and the best is the last",
        fix=f"set {_EVERY}, or remove {_BEST}",
        changes={_BEST: None},
    )


RULES = (
    evaluation_without_validation,
    early_stopping_without_evaluation,
    best_model_without_validation,
    best_model_is_the_last,
)

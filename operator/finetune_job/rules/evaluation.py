"""Held-out loss: evaluation, early stopping, and which checkpoint becomes the result."""

from __future__ import annotations

from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import NoEffect, no_effect_rules

_EVERY = "evaluation.everySteps"
_BEST = "evaluation.loadBestModelAtEnd"
_VALIDATION = "data.validation"
_API = ("this product's API",)
_STOPPING = "evaluation.earlyStopping"
_STEPS = "training.maxSteps"


@rule(
    "best-model-without-validation",
    "The best checkpoint is found on held-out records",
    reads=(_BEST, _VALIDATION),
    sources=_API,
    reproduction=Reproduction(
        "tests/pitfalls/test_results.py::test_without_held_out_records_nothing_is_evaluated",
        "no error: the last checkpoint is exported, whatever it is worth",
    ),
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
    reads=(_BEST, _EVERY, "training.maxSteps"),
    sources=_API,
    reproduction=Reproduction(
        "tests/pitfalls/test_evaluation.py::test_one_evaluation_chooses_nothing",
        "no error: the last checkpoint is the only one that competes",
    ),
    holds_for=OURS,
)
def best_model_is_the_last(context: RuleContext) -> Problem | None:
    evaluation, steps = context.spec.evaluation, context.spec.training.max_steps
    every = evaluation.every_steps
    if not evaluation.load_best_model_at_end or context.spec.data.validation is None:
        return None
    if every is not None and (steps is None or every < steps):
        return None
    reason = f"{_EVERY} is unset" if every is None else f"the run has {steps} steps and is evaluated every {every}"
    return Problem(
        field=_BEST,
        value=True,
        message=f"NoEffect: {reason}, so only the last checkpoint is evaluated and the best is the last",
        fix=f"set {_EVERY} to less than the steps of the run, or remove {_BEST}",
        changes={_BEST: None},
    )


@rule(
    "early-stopping-without-evaluation",
    "Early stopping needs evaluations to go by",
    reads=(_STOPPING, _EVERY, _VALIDATION),
    sources=("transformers: trainer_callback.py, EarlyStoppingCallback.on_train_begin",),
    reproduction=Reproduction(
        "tests/pitfalls/test_evaluation.py::test_one_evaluation_stops_nothing_early",
        "no error: the run ends at its last step, however the loss rises",
    ),
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
    "early-stopping-after-the-end",
    "Early stopping needs time to stop early",
    severity="warning",
    reads=(_STOPPING, _EVERY, _STEPS),
    sources=("this product: the first evaluation is what the next `patience` ones are compared with",),
    reproduction=Reproduction(
        "tests/pitfalls/test_evaluation.py::test_a_run_may_be_over_before_patience_is",
        "no error: the run ends at its last step, however the loss rises",
    ),
    holds_for=OURS,
)
def early_stopping_after_the_end(context: RuleContext) -> Problem | None:
    evaluation, steps = context.spec.evaluation, context.spec.training.max_steps
    stopping, every = evaluation.early_stopping, evaluation.every_steps
    if stopping is None or every is None or steps is None:
        return None
    earliest = (stopping.patience + 1) * every
    if earliest < steps:
        return None
    soon = (steps - 1) // (stopping.patience + 1)
    return Problem(
        field=_STOPPING,
        value=f"patience {stopping.patience}",
        message=f"NoEffect: with an evaluation every {every} steps it could end the run after step {earliest} at the "
        f"earliest, and the run has {steps}",
        fix=f"set {_EVERY} to {soon} or less" if soon else f"remove {_STOPPING}",
        changes={_EVERY: soon} if soon else {_STOPPING: None},
    )


NO_EFFECT = (
    NoEffect(
        "evaluation-without-validation",
        "Evaluation needs held-out records",
        (_EVERY,),
        (_VALIDATION,),
        lambda context: context.spec.data.validation is None,
        "there are no held-out records to evaluate on",
        Reproduction(
            "tests/pitfalls/test_results.py::test_without_held_out_records_nothing_is_evaluated",
            "no error: the run's history holds no evaluation",
        ),
        f"set {_VALIDATION}.source",
    ),
)
RULES = (
    *no_effect_rules(__name__, NO_EFFECT),
    best_model_without_validation,
    best_model_is_the_last,
    early_stopping_without_evaluation,
    early_stopping_after_the_end,
)

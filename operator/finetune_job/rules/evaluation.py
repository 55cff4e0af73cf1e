"""Held-out loss and early stopping."""

from __future__ import annotations

from finetune_job.rules.context import RuleContext
from finetune_job.rules.define import OURS, Problem, rule
from finetune_job.rules.no_effect import NoEffect, no_effect_rules
from finetune_job.rules.rule import Reproduction

_EVERY = "evaluation.everySteps"
_STOPPING = "evaluation.earlyStopping"
_VALIDATION = "data.validation"
_STEPS = "training.maxSteps"


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
        message=f"NoEffect: with an evaluation every {every} steps it could end the run after step {earliest} at the earliest, and "
        f"the run has {steps}",
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
RULES = (*no_effect_rules(__name__, NO_EFFECT), early_stopping_without_evaluation, early_stopping_after_the_end)

"""Rules on what uses the held-out loss: evaluation, early stopping, and the choice of the resulting checkpoint."""

from __future__ import annotations

from finetune_job.rules.rule import Problem, RuleContext, rule

_EVERY = "evaluation.everySteps"
_BEST = "evaluation.loadBestModelAtEnd"
_VALIDATION = "data.validation"
_STOPPING = "evaluation.earlyStopping"


@rule("best-model-without-validation")
def best_model_without_validation(context: RuleContext) -> Problem | None:
    if not context.spec.evaluation.load_best_model_at_end or context.spec.data.validation is not None:
        return None
    return Problem(value=True)


@rule("best-model-is-the-last")
def best_model_is_the_last(context: RuleContext) -> Problem | None:
    evaluation, steps = context.spec.evaluation, context.spec.training.max_steps
    every = evaluation.every_steps
    if not evaluation.load_best_model_at_end or context.spec.data.validation is None:
        return None
    if every is not None and (steps is None or every < steps):
        return None
    reason = f"{_EVERY} is unset" if every is None else f"the run has {steps} steps and is evaluated every {every}"
    return Problem(
        value=True,
        message=f"NoEffect: {reason}, so only the last checkpoint is evaluated and the best is the last",
        fix=f"set {_EVERY} to less than the steps of the run, or remove {_BEST}",
    )


@rule("early-stopping-without-evaluation")
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
        value=f"patience {stopping.patience}",
        message="without held-out records evaluated during the run there is no loss to compare: the run would never stop early",
        fix=f"set {' and '.join(missing)}, or remove {_STOPPING}",
    )


@rule("early-stopping-after-the-end")
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
        value=f"patience {stopping.patience}",
        message=f"NoEffect: with an evaluation every {every} steps early stopping could end the run after step {earliest} at the "
        f"earliest, and the run has {steps}",
        fix=f"set {_EVERY} to {soon} or less" if soon else f"remove {_STOPPING}",
        changes={_EVERY: soon} if soon else {_STOPPING: None},
    )


rule("evaluation-without-validation")(lambda context: context.spec.data.validation is None)

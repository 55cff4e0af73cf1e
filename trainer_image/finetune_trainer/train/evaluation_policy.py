"""When to evaluate, what an evaluation means, and when a run that no longer gets better ends.

All that decisions depend on is `RunState`, which every checkpoint holds: a resumed run decides as the undisturbed one.
"""

from __future__ import annotations

from finetune_job.plan.run_plan import EvaluationPlan
from finetune_trainer.checkpoint.manifest import RunState


def is_due(step: int, total: int, plan: EvaluationPlan) -> bool:
    """Whether to evaluate after optimizer step `step`, where 0 is before the first: first, every so often, and last."""
    return step in (0, total) or (plan.every_steps is not None and step % plan.every_steps == 0)


def judged(state: RunState, step: int, loss: float, plan: EvaluationPlan) -> tuple[RunState, bool]:
    """The state after an evaluation, and whether the model after `step` is the best so far.

    The base model, evaluated at step 0, is nothing that training could export, so it is no competitor. Each evaluation is compared
    with the best before it, as transformers' EarlyStoppingCallback does: a loss that falls, but by no more than `min_delta`, is a
    new best and all the same no improvement.
    """
    if step == 0:
        return state.model_copy(update={"initial_eval_loss": loss, "eval_loss": loss}), False
    best = state.best_eval_loss
    is_best = best is None or loss < best
    min_delta = plan.early_stopping.min_delta if plan.early_stopping else 0.0
    has_improved = best is None or best - loss > min_delta
    changes: dict[str, float | int] = {
        "eval_loss": loss,
        "evaluations_without_improvement": 0 if has_improved else state.evaluations_without_improvement + 1,
    }
    if is_best:
        changes |= {"best_eval_loss": loss, "best_step": step}
    return state.model_copy(update=changes), is_best


def is_exhausted(state: RunState, plan: EvaluationPlan) -> bool:
    """Whether early stopping ends the run."""
    return plan.early_stopping is not None and state.evaluations_without_improvement >= plan.early_stopping.patience

"""Decisions of the training loop before and after each step: learning rate, evaluation, early stopping, loss scale.

They are pure functions of the plan, the step and `RunState`, which every checkpoint holds, so a resumed run decides like an
uninterrupted one.
"""

from __future__ import annotations

import math

from finetune_job.api.training import Scheduler
from finetune_job.plan.run_plan import EvaluationPlan, RunPlan, TrainingPlan
from finetune_trainer.checkpoint.manifest import LossScale, RunState

TIMESCALE_WITHOUT_WARMUP = 10_000
"""Time scale of InverseSqrt without a warm-up, as in big_vision and transformers."""
UNSCALED = 1.0
FIRST_LOSS_SCALE = LossScale(factor=2.0**16)
"""First loss scale, as in torch.amp.GradScaler."""
LARGEST_LOSS_SCALE = 2.0**24
"""Maximum loss scale. Losses are float32, and their sums over long batches must stay finite."""
LOSS_SCALE_GROWTH_STEPS = 2000
"""Number of steps without an overflow after which the factor is doubled, as in torch.amp.GradScaler."""


def least_row_length(plan: RunPlan) -> int:
    """Return the length to pad shorter rows to: the maximum for compiled layers and packed rows, which nearly reach it."""
    return plan.data.max_sequence_length if plan.training.compile and plan.data.packing else 1


def warmup_steps(total: int, ratio: float) -> int:
    """Return the number of steps in which the rate rises; at least one step is left after them."""
    return min(_share(total, ratio), max(total - 1, 0))


def _share(total: int, ratio: float) -> int:
    """Round a share of the steps up, ignoring float error: 0.14 of 50 steps is 7, although 50 * 0.14 is slightly more than 7."""
    return math.ceil(total * ratio - 1e-9)


def learning_rate(step: int, total: int, training: TrainingPlan) -> float:
    """Return the learning rate of step `step`, counted from 0. It is not 0 in the first step, so that each step trains.

    Warm-up: peak * (step + 1) / warm-up steps. Then peak * (m + (1 - m) * `schedule_shape`), with m the minimum ratio. After the
    warm-up this equals transformers' `get_scheduler`. In the warm-up it is one step ahead, because `get_scheduler` starts at 0.
    """
    warmup = warmup_steps(total, training.warmup_ratio)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    least = training.min_learning_rate_ratio
    return training.learning_rate * (least + (1 - least) * schedule_shape(step - warmup, total - warmup, warmup, training))


def schedule_shape(step: int, num_steps: int, warmup: int, training: TrainingPlan) -> float:
    """Return the schedule's value at `step` of the `num_steps` steps after the warm-up. It starts at 1 and never falls below 0.

    With p = step / num_steps: constant 1; linear 1 - p; cosine (1 + cos(pi p)) / 2 (Loshchilov and Hutter, 2017, one period);
    inverse square root sqrt(t / (t + step)) with the time scale t = warm-up steps (Vaswani et al., 2017, section 5.3, as scaled
    by transformers); warm-up stable decay: 1, then linear to 0 over the last steps (Hu et al., 2024, section 4).
    """
    match training.scheduler:
        case Scheduler.CONSTANT:
            return 1.0
        case Scheduler.LINEAR:
            return 1 - step / num_steps
        case Scheduler.COSINE:
            return (1 + math.cos(math.pi * step / num_steps)) / 2
        case Scheduler.INVERSE_SQRT:
            timescale = warmup or TIMESCALE_WITHOUT_WARMUP
            return math.sqrt(timescale / (timescale + step))
        case Scheduler.WARMUP_STABLE_DECAY:
            decay = min(_share(num_steps + warmup, training.decay_ratio), num_steps)
            return min(1.0, (num_steps - step) / decay) if decay else 1.0


def is_evaluation_due(step: int, total: int, plan: EvaluationPlan) -> bool:
    """Whether to evaluate after step `step`: before the first step (0), every `every_steps` steps, and after the last step."""
    return step in (0, total) or (plan.every_steps is not None and step % plan.every_steps == 0)


def after_evaluation(state: RunState, step: int, loss: float, plan: EvaluationPlan) -> tuple[RunState, bool]:
    """Return the state after an evaluation, and whether the evaluated model is the best so far.

    The base model, evaluated at step 0, does not count, because training cannot export it. Each evaluation is compared with the
    best earlier one, as in transformers' EarlyStoppingCallback: a loss that falls by no more than `min_delta` is a new best, but
    not an improvement.
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


def is_stopped_early(state: RunState, plan: EvaluationPlan) -> bool:
    """Whether early stopping ends the run."""
    return plan.early_stopping is not None and state.evaluations_without_improvement >= plan.early_stopping.patience


def halved_loss_scale(factor: float) -> float | None:
    """Return the loss scale to try after an overflow; None if the gradients are too large even without scaling."""
    return factor / 2 if factor > UNSCALED else None


def next_loss_scale(before: LossScale, used: float) -> LossScale:
    """Return the loss scale of the next step. used: the factor with which this step's gradients were finite."""
    if used != before.factor:
        return LossScale(factor=used)
    if before.steps + 1 < LOSS_SCALE_GROWTH_STEPS:
        return LossScale(factor=used, steps=before.steps + 1)
    return LossScale(factor=min(used * 2, LARGEST_LOSS_SCALE))

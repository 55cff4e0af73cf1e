"""Progress of the training run: as status shows it, and what would be lost by a preemption now, as a rise of its priority."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from math import floor, isfinite

from pydantic import ValidationError

from finetune_job.api.status import ProgressStatus
from finetune_job.plan.launch_plan import CheckpointInterval
from finetune_job.progress import Progress
from finetune_operator.decide.times import timestamp


def progress_status(progress: Progress, before: ProgressStatus | None, now: datetime) -> ProgressStatus:
    """What is copied into status; numbers with a fraction as text of six digits."""
    advanced = before is None or before.step != progress.step or not before.advanced_time
    first = before.first_step_time if before is not None else ""
    return ProgressStatus(
        first_step_time=first or (timestamp(now) if progress.step else ""),
        advanced_time=timestamp(now) if advanced or before is None else before.advanced_time,
        step=progress.step,
        total_steps=progress.total_steps,
        loss=_text(progress.loss),
        eval_loss=_text(progress.eval_loss),
        initial_eval_loss=_text(progress.initial_eval_loss),
        tokens_per_second=_text(progress.tokens_per_second),
        calculated_tokens_per_second=_text(progress.calculated_tokens_per_second),
        mfu=_text(progress.mfu),
        goodput=_text(progress.goodput),
        checkpoint_step=progress.checkpoint_step,
        summary=f"{progress.step}/{progress.total_steps}",
    )


def progress_of_facts(facts: Mapping[str, str], attempt: int) -> Progress | None:
    """The last word on progress: the facts of the training pod's report that carry the names of `Progress`."""
    try:
        return Progress.model_validate({**facts, "attempt": attempt})
    except ValidationError:
        return None


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"


STEPS_OF_A_BOOST = 4
"""It rises by quarters, because every change is a write."""


def priority_boost(most: int, progress: Progress, interval: CheckpointInterval) -> int:
    """0 right after a complete checkpoint, `most` right before the next is due and until it is complete; in whole quarters
    between.

    What is lost is counted from the latest complete checkpoint, so an asynchronous one that is still being written counts for
    nothing. A checkpoint that is due by the clock is expected by the pace of the steps.
    """
    lost_steps = progress.step - (progress.checkpoint_step or 0)
    shares = [0.0]
    if interval.every_steps > 0:
        shares.append(lost_steps / interval.every_steps)
    pace = progress.step_seconds_median
    # The numbers come from a container, which may send any.
    if interval.every_seconds and pace is not None and isfinite(pace):
        shares.append(lost_steps * pace / interval.every_seconds)
    share = min(max(shares), 1.0)
    return most * floor(share * STEPS_OF_A_BOOST + 0.5) // STEPS_OF_A_BOOST

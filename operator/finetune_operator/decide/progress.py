"""Progress of the training run, as status shows it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from pydantic import ValidationError

from finetune_job.api.status import ProgressStatus
from finetune_job.progress import Progress
from finetune_operator.decide.times import timestamp


def progress_status(progress: Progress, before: ProgressStatus | None, now: datetime) -> ProgressStatus:
    """Convert progress to its form in status, where fractional numbers are texts of six digits."""
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
    """Read the final progress from the facts of the training pod's report; None if they do not have it."""
    try:
        return Progress.model_validate({**facts, "attempt": attempt})
    except ValidationError:
        return None


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"

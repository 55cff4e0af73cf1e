"""Jobs of a cluster as a table and as data, for `list`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from finetune_cli.jobs.durations import duration_text
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.progress import figures, seconds_left, stage_name, state
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.render.columns import figure, table
from finetune_job.names import Role

_MOST_CELL = 40
_HEADER = ("NAME", "STATE", "STAGE", "STEP", "LEFT", "LOSS", "ATTEMPTS", "AGE")


def jobs_text(jobs: Sequence[SeenJob], now: datetime, *, everywhere: bool) -> str:
    """Return a table with one line for each job."""
    header = ("NAMESPACE", *_HEADER) if everywhere else _HEADER
    return table(header, [(*([plain(job.namespace)] if everywhere else []), *_row(job, now)) for job in jobs])


def _row(job: SeenJob, now: datetime) -> tuple[str, ...]:
    progress, left = figures(job), seconds_left(job, now)
    return (
        plain(job.name, 80),
        plain(state(job), _MOST_CELL),
        stage_name(job) or "-",
        "-" if progress is None else f"{progress.step}/{progress.total}",
        duration_text(left) or "-",
        "-" if progress is None else figure(progress.loss),
        str(num_attempts(job)),
        duration_text(age(job, now)) or "-",
    )


def age(job: SeenJob, now: datetime) -> float | None:
    """Return the seconds since the job was created."""
    return None if job.created is None else max((now - job.created).total_seconds(), 0.0)


def num_attempts(job: SeenJob) -> int:
    """Return the number of attempts of training."""
    return job.status.attempt + 1 if job.attempts_of(Role.TRAIN) else 0


def jobs_document(jobs: Sequence[SeenJob], now: datetime) -> dict[str, Any]:
    """Return the jobs as data."""
    return {"jobs": [summary(job, now) for job in jobs]}


def summary(job: SeenJob, now: datetime) -> dict[str, Any]:
    """Return a job as data; times are seconds."""
    progress = figures(job)
    return {
        "namespace": job.namespace,
        "name": job.name,
        "phase": job.phase,
        "state": state(job),
        "stage": stage_name(job),
        "step": None if progress is None else progress.step,
        "totalSteps": None if progress is None else progress.total,
        "loss": None if progress is None else progress.loss,
        "evalLoss": None if progress is None else progress.eval_loss,
        "secondsLeft": seconds_left(job, now),
        "attempts": num_attempts(job),
        "ageSeconds": age(job, now),
        "unreadable": list(job.unreadable),
    }

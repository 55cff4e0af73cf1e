"""Jobs of a cluster as a table and as data: `list` and `top`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from finetune_cli.jobs.durations import duration_text
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.progress import figures, ranks_now, seconds_left, stage_name, state
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.render.columns import figure, table
from finetune_job.names import Role

_MOST_CELL = 40
_HEADER = ("NAME", "STATE", "STAGE", "STEP", "LEFT", "LOSS", "ATTEMPTS", "AGE")


def jobs_text(jobs: Sequence[SeenJob], now: datetime, *, everywhere: bool) -> str:
    """One line for each."""
    header = ("NAMESPACE", *_HEADER) if everywhere else _HEADER
    return table(header, [(*([plain(job.namespace)] if everywhere else []), *_row(job, now)) for job in jobs])


def _row(job: SeenJob, now: datetime) -> tuple[str, ...]:
    found, left = figures(job), seconds_left(job, now)
    return (
        plain(job.name, 80),
        plain(state(job), _MOST_CELL),
        stage_name(job) or "-",
        "-" if found is None else f"{found.step}/{found.total}",
        duration_text(left) or "-",
        "-" if found is None else figure(found.loss),
        str(num_attempts(job)),
        duration_text(age(job, now)) or "-",
    )


def age(job: SeenJob, now: datetime) -> float | None:
    """Seconds since it was made."""
    return None if job.created is None else max((now - job.created).total_seconds(), 0.0)


def num_attempts(job: SeenJob) -> int:
    """Of training."""
    return job.status.attempt + 1 if job.attempts_of(Role.TRAIN) else 0


def jobs_document(jobs: Sequence[SeenJob], now: datetime) -> dict[str, Any]:
    """The same as data."""
    return {"jobs": [summary(job, now) for job in jobs]}


def summary(job: SeenJob, now: datetime) -> dict[str, Any]:
    """A job as data; times are seconds."""
    found = figures(job)
    return {
        "namespace": job.namespace,
        "name": job.name,
        "phase": job.phase,
        "state": state(job),
        "stage": stage_name(job),
        "step": None if found is None else found.step,
        "totalSteps": None if found is None else found.total,
        "loss": None if found is None else found.loss,
        "evalLoss": None if found is None else found.eval_loss,
        "secondsLeft": seconds_left(job, now),
        "attempts": num_attempts(job),
        "ageSeconds": age(job, now),
        "unreadable": list(job.unreadable),
    }


_TOP_HEADER = ("NAMESPACE", "NAME", "TEAM", "DEVICES", "STEP", "TOKENS/S", "PER DEVICE", "MFU", "AT WORK", "LEFT")


def running(jobs: Sequence[SeenJob]) -> list[SeenJob]:
    """Those that train, most devices first."""
    found = [job for job in jobs if state(job) == "Running" and stage_name(job) == Role.TRAIN]
    return sorted(found, key=lambda job: (-ranks_now(job), job.title))


def top_text(jobs: Sequence[SeenJob], now: datetime) -> str:
    """What trains now, and what it makes of its devices."""
    rows = []
    for job in running(jobs):
        found = figures(job)
        tokens = found.tokens_per_second if found is not None else None
        rows.append(
            (
                plain(job.namespace),
                plain(job.name, 80),
                plain(job.team, _MOST_CELL),
                str(ranks_now(job)),
                "-" if found is None else f"{found.step}/{found.total}",
                figure(tokens, ".0f"),
                figure(None if tokens is None else tokens / ranks_now(job), ".0f"),
                figure(found.mfu if found else None, ".1%"),
                figure(found.goodput if found else None, ".0%"),
                duration_text(seconds_left(job, now)) or "-",
            )
        )
    devices = sum(ranks_now(job) for job in running(jobs))
    return table(_TOP_HEADER, rows) + f"{len(rows)} training, {devices} devices; {len(jobs) - len(rows)} other jobs\n"


def top_document(jobs: Sequence[SeenJob], now: datetime) -> dict[str, Any]:
    """The same as data."""
    entries = []
    for job in running(jobs):
        found = figures(job)
        entries.append(
            {
                **summary(job, now),
                "team": job.team,
                "devices": ranks_now(job),
                "tokensPerSecond": found.tokens_per_second if found else None,
                "mfu": found.mfu if found else None,
                "goodput": found.goodput if found else None,
            }
        )
    return {"jobs": entries, "others": len(jobs) - len(entries)}

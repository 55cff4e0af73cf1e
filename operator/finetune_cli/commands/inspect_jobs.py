"""`list` and `status` of jobs in a cluster: what is printed, as text and as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from finetune_cli.jobs.progress import figures
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.jobs.stored_run import StoredCheckpoint
from finetune_cli.render.jobs import jobs_document, jobs_text


@dataclass(frozen=True)
class CommandAnswer:
    """Answer of a command, as text and as data."""

    text: Callable[[], str]
    document: Callable[[], dict[str, Any]]


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def list_changes(jobs: list[SeenJob], before: dict[str, str] | None, place: str, *, everywhere: bool) -> CommandAnswer | None:
    """Show the jobs that have changed; None if none has. before: earlier resource versions by UID; None: show all jobs."""
    now, shown = utc_now(), [job for job in jobs if before is None or before.get(job.uid) != job.resource_version]
    if before is not None and not shown:
        return None

    def text() -> str:
        if not shown:
            return f"there are no FineTuneJobs in {place}\n"
        whole = jobs_text(shown, now, everywhere=everywhere)
        return whole if before is None else whole.partition("\n")[2]

    return CommandAnswer(text, lambda: jobs_document(shown, now))


def status_answer(
    job: SeenJob, losses: list[float], checkpoints: Sequence[StoredCheckpoint] | None = None, *, is_watched: bool
) -> CommandAnswer:
    """Show the state of a job.

    losses: all known losses; for a watched job, the latest is appended. If `checkpoints` is None, the workspace was not read.
    """
    # These imports are slow, and `list` does not need them.
    from finetune_cli.jobs.diagnosis import diagnose
    from finetune_cli.render.job_status import status_document, status_text

    progress, now = figures(job), utc_now()
    if is_watched and progress is not None and progress.loss is not None:
        losses.append(progress.loss)
    diagnosis = diagnose(job, now)
    return CommandAnswer(
        lambda: status_text(job, diagnosis, now, losses, checkpoints),
        lambda: status_document(job, diagnosis, now, losses, checkpoints),
    )

"""Deadlines: until all pods of a role run, and for the whole job."""

from __future__ import annotations

from datetime import datetime, timedelta

from finetune_job.api.run import RunSpec
from finetune_job.api.status import FineTuneJobStatus
from finetune_operator.decide.clock import moment_after
from finetune_operator.decide.observed import BatchJobView


def startup_deadline(run: RunSpec, batch_job: BatchJobView) -> datetime:
    """When all pods of this Job must run. Counted from the Job's start, which a queue sets back when it lets the Job go on."""
    return (batch_job.start_time or batch_job.created) + timedelta(seconds=run.startup_deadline_seconds)


def active_deadline(run: RunSpec, status: FineTuneJobStatus) -> datetime | None:
    """When the whole job must be done; None without a limit or before the start."""
    if run.active_deadline_seconds is None or not status.start_time:
        return None
    return moment_after(status.start_time, run.active_deadline_seconds)

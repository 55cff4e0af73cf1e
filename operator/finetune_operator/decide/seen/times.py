"""Times in status (RFC 3339, UTC, whole seconds), and the deadlines derived from them: for the start of a role's pods once they
have nodes, for the next training step, and for the whole job.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from finetune_job.api.job import RunSpec
from finetune_job.api.status import FineTuneJobStatus
from finetune_operator.decide.seen.children_seen import BatchJobView, PodView


def timestamp(moment: datetime) -> str:
    """Format a moment as status shows it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_after(text: str, seconds: float) -> datetime | None:
    """Add seconds to a time from status. Returns None if the time is not in the format of `timestamp`: somebody has edited the
    status, which must not make a pass fail.
    """
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) + timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        return None


def startup_deadline(run: RunSpec, batch_job: BatchJobView, pods: tuple[PodView, ...]) -> datetime | None:
    """The time by which all pods of this Job must run, counted from when all of them have nodes: waiting for capacity is free.

    Without pods, it is counted from the start of the Job; None before that. It is not counted from the admission by a queue,
    which comes shortly before the Job controller starts the Job.
    """
    times = [pod.scheduled or pod.created for pod in pods]
    if batch_job.start_time is not None:
        times.append(batch_job.start_time)
    return max(times) + timedelta(seconds=run.startup_deadline_seconds) if times else None


def stall_deadline(run: RunSpec, status: FineTuneJobStatus, pods: tuple[PodView, ...], nodes: int) -> datetime | None:
    """The time by which training must have completed another step; None without a limit, or until all pods are running."""
    started = [pod.started for pod in pods if pod.started is not None]
    if run.stall_deadline_seconds is None or len(started) < nodes:
        return None
    seconds = run.stall_deadline_seconds
    running = max(started) + timedelta(seconds=seconds)
    advanced = moment_after(status.progress.advanced_time, seconds) if status.progress is not None else None
    return running if advanced is None else max(running, advanced)


def active_deadline(run: RunSpec, status: FineTuneJobStatus) -> datetime | None:
    """The time by which the whole job must be done; None without a limit or before the start. Suspension does not count."""
    if run.active_deadline_seconds is None or not status.start_time:
        return None
    return moment_after(status.start_time, run.active_deadline_seconds + status.suspended_seconds)

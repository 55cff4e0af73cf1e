"""Counts the GPU seconds of training attempts: how long their pods held GPUs, and how much of the training was kept.

They are added to status together with the end of an attempt, its interruption by a queue, or the end of the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from finetune_job.api.status import Attempt, FineTuneJobStatus, GpuSeconds
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome
from finetune_operator.decide.gang.attempts import newly_closed, record_of
from finetune_operator.decide.seen.children_seen import PodView
from finetune_operator.decide.seen.frozen_plan import PlanLost, frozen_plan
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import attempt_of, is_ended
from finetune_operator.decide.seen.times import moment_after, timestamp

_KEEPS_ITS_STEPS = (AttemptOutcome.SUCCEEDED, AttemptOutcome.SUSPENDED, AttemptOutcome.RESIZED)


class HeldSeconds(NamedTuple):
    """How many seconds pods held their nodes."""

    waiting: int = 0
    """Seconds before the container started."""
    saved: int = 0
    """Seconds of training up to the newest checkpoint."""
    unsaved: int = 0
    """Seconds of training since then."""


def held_seconds(pods: Iterable[PodView], since: datetime | None, now: datetime, saved: datetime | None) -> HeldSeconds:
    """Return how long pods held their nodes between two moments, in whole seconds, like the API server's times.

    Args:
        pods: the pods of one attempt.
        since: the first moment, up to which seconds are already counted; None if none are.
        now: the second moment.
        saved: when the newest checkpoint was seen; None if no checkpoint exists.
    """
    waiting = kept = unsaved = 0.0
    after, before = since.timestamp() if since is not None else 0.0, float(int(now.timestamp()))
    checkpoint = saved.timestamp() if saved is not None else 0.0
    for pod in pods:
        begun = pod.scheduled or pod.started
        if begun is None:
            continue
        end = min(_end(pod, now).timestamp(), before)
        started = pod.started.timestamp() if pod.started is not None else end
        waiting += _seconds(max(begun.timestamp(), after), min(started, end))
        kept += _seconds(max(started, after), min(checkpoint, end))
        unsaved += _seconds(max(started, checkpoint, after), end)
    return HeldSeconds(int(waiting), int(kept), int(unsaved))


def with_gpu_seconds(observed: Observed, after: FineTuneJobStatus, now: datetime) -> FineTuneJobStatus:
    """Return the status `after`. If it ends or interrupts the current training attempt, the attempt's GPU seconds are added."""
    before = observed.job.status
    number = attempt_of(before, Role.TRAIN)
    old, new = record_of(before, Role.TRAIN, number), record_of(after, Role.TRAIN, number)
    is_interrupted = old is not None and new is not None and new.interruptions > old.interruptions
    is_closed = newly_closed(before, after, Role.TRAIN, number) is not None
    job_ends = observed.job.deleting or (is_ended(after) and not is_ended(before))
    if not (is_closed or is_interrupted or job_ends):
        return after
    run = frozen_plan(observed)
    if isinstance(run, PlanLost) or run.placement.gpu_resource_name is None:
        return after
    progress = after.progress
    saved = moment_after(progress.checkpoint_time, 0.0) if progress is not None else None
    # A gang that a queue preempts has time to save, as with every orderly end.
    keeps_steps = new is not None and (new.outcome in _KEEPS_ITS_STEPS or new.failure is FailureClass.PREEMPTED)
    known = observed.pods_of(Role.TRAIN, number)
    pods = [*known, *_vanished_pods(before, new, known, run.plan.parallelism.nodes)]
    usage = held_seconds(pods, moment_after(before.gpu_seconds_until, 0.0), now, now if is_interrupted or keeps_steps else saved)
    if not any(usage):
        return after
    gpus = run.plan.parallelism.processes_per_node
    spent = GpuSeconds(waiting=usage.waiting * gpus, productive=usage.saved * gpus, lost=usage.unsaved * gpus)
    attempts = [
        record.model_copy(update={"gpu_seconds": _sum(record.gpu_seconds, spent)}) if record is new else record
        for record in after.attempts
    ]
    return after.model_copy(
        update={"attempts": attempts, "gpu_seconds": _sum(before.gpu_seconds, spent), "gpu_seconds_until": timestamp(now)}
    )


def _vanished_pods(status: FineTuneJobStatus, record: Attempt | None, seen: Sequence[PodView], nodes: int) -> list[PodView]:
    """Reconstruct an attempt's pods that vanished while no operator was running. An attempt has a record once all its pods have
    run. Vanished pods count as running until another pod ended or, if none did, until the last step that was seen.
    """
    # The record does not say when an interrupted attempt resumed, so its time cannot be reconstructed.
    if record is None or record.interruptions:
        return []
    ends = [pod.finished for pod in seen if pod.finished is not None]
    scheduled, started, advanced = (
        moment_after(text, 0.0)
        for text in (record.scheduled_time, record.running_time, status.progress.advanced_time if status.progress else "")
    )
    end = min(ends, default=advanced)
    if scheduled is None or started is None or end is None:
        return []
    pod = PodView("", "", Role.TRAIN, record.number, scheduled, scheduled=scheduled, started=started, finished=end)
    # The number in status may have been edited by hand, so it is limited to what the plan allows.
    in_attempt = nodes if record.nodes is None else min(max(record.nodes, 1), nodes)
    return [pod] * (in_attempt - len({known.node_rank for known in seen}))


def _end(pod: PodView, now: datetime) -> datetime:
    """When the pod stopped holding its GPUs."""
    if pod.finished is not None:
        return pod.finished
    # A pod without a report was deleted by force, or its node is gone: it held its GPUs until its deletion was due.
    due = pod.deletion_due or pod.deletion_requested
    return due if pod.is_terminal and due is not None else now


def _seconds(begun: float, end: float) -> float:
    return max(end - begun, 0.0)


def _sum(total: GpuSeconds | None, more: GpuSeconds) -> GpuSeconds:
    total = total or GpuSeconds()
    return GpuSeconds(
        waiting=total.waiting + more.waiting, productive=total.productive + more.productive, lost=total.lost + more.lost
    )

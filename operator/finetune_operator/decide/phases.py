"""Durations of a job's phases, as far as they follow from its status."""

from __future__ import annotations

from datetime import datetime

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import find_condition
from finetune_job.names import Role
from finetune_job.reasons import STAGES, ConditionType, Reason
from finetune_operator.decide.seen.times import moment_after

FIRST_STEP = "first_step"
"""The time from the start of the job to the first optimizer step."""
PHASES = ("pending", "fetch", "preflight", "queue", "schedule", "startup", "pull", "train", "merge", "publish", FIRST_STEP)


def phase_seconds(status: FineTuneJobStatus, created: datetime | None) -> dict[str, float]:
    """Return the seconds of each phase whose beginning and end are in the status, by its name from `PHASES`."""
    done = {kind: _time_of(status, kind) for kind in STAGES}
    skipped = {
        kind for kind in STAGES if (condition := find_condition(status.conditions, kind)) and condition.reason == Reason.SKIPPED
    }
    start = _seconds(status.start_time)
    first = next((attempt for attempt in status.attempts if attempt.role is Role.TRAIN), None)
    released = _seconds(first.start_time) if first is not None else None
    scheduled = _seconds(first.scheduled_time) if first is not None else None
    prepared = _seconds(first.prepared_time) if first is not None else None
    running = _seconds(first.running_time) if first is not None else None
    trained = done[ConditionType.TRAINED]
    stepped = _seconds(status.progress.first_step_time) if status.progress is not None else None
    spans = {
        "pending": (created.timestamp() if created is not None else None, start),
        "fetch": (start, None if ConditionType.FETCHED in skipped else done[ConditionType.FETCHED]),
        "preflight": (done[ConditionType.FETCHED], done[ConditionType.PREPARED]),
        "queue": (done[ConditionType.PREPARED], released),
        "schedule": (released, scheduled),
        # Includes volumes and network, and also the image pull if the kubelet does not report when the pod was prepared.
        "startup": (scheduled, running if prepared is None else prepared),
        "pull": (prepared, running),
        "train": (running, trained),
        "merge": (trained, None if ConditionType.MERGED in skipped else done[ConditionType.MERGED]),
        "publish": (done[ConditionType.MERGED], None if ConditionType.PUBLISHED in skipped else done[ConditionType.PUBLISHED]),
        FIRST_STEP: (start, stepped),
    }
    return {phase: max(end - begun, 0.0) for phase, (begun, end) in spans.items() if begun is not None and end is not None}


def _time_of(status: FineTuneJobStatus, kind: ConditionType) -> float | None:
    condition = find_condition(status.conditions, kind)
    return _seconds(condition.last_transition_time) if condition is not None and condition.status == "True" else None


def _seconds(text: str) -> float | None:
    moment = moment_after(text, 0.0) if text else None
    return None if moment is None else moment.timestamp()

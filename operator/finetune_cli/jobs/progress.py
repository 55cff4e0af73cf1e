"""The progress of a job: its state and stage in one word each, its figures, and its time left. `now` is the current time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from finetune_cli.jobs.documents import decimal, moment
from finetune_cli.jobs.seen import NOT_SEEN, SeenJob
from finetune_job.api.status import Attempt, Condition
from finetune_job.conditions import find_condition
from finetune_job.names import Role
from finetune_job.reasons import STAGES, ConditionType, Phase, Reason

STAGE_NAMES = {
    ConditionType.VALIDATED: "validate",
    ConditionType.FETCHED: "fetch",
    ConditionType.PREPARED: "preflight",
    ConditionType.TRAINED: "train",
    ConditionType.MERGED: "merge",
    ConditionType.PUBLISHED: "publish",
}
"""Condition -> name of its stage, in order; each name but the first is a `Role`."""
_UNDER_WAY = (Phase.FETCHING, Phase.PREFLIGHT, Phase.TRAINING, Phase.MERGING, Phase.PUBLISHING, Phase.FINISHING, NOT_SEEN)
"""Phases that say no more than the stage does."""
_NOT_BEGUN = (Reason.PENDING, Reason.NOT_OBSERVED)


def current_stage(job: SeenJob) -> Condition | None:
    """Return the condition of the first stage that is not done; None if all are done, or nothing is known."""
    conditions = (find_condition(job.status.conditions, kind) for kind in STAGES)
    return next((condition for condition in conditions if condition is not None and condition.status != "True"), None)


def stage_name(job: SeenJob) -> str:
    """Return the name of the current stage; empty if there is none."""
    stage = current_stage(job)
    return "" if stage is None else STAGE_NAMES[stage.type]


def state(job: SeenJob) -> str:
    """Return `Running`, what holds the job up (`Queued`, `Unschedulable`, ...), or how it has ended."""
    phase, stage = job.phase, current_stage(job)
    if phase not in _UNDER_WAY or stage is None or stage.reason in _NOT_BEGUN:
        return phase
    return stage.reason


@dataclass(frozen=True)
class Figures:
    """Training figures from the job's status; None: not known."""

    step: int
    total: int
    loss: float | None
    eval_loss: float | None
    initial_eval_loss: float | None
    tokens_per_second: float | None
    calculated_tokens_per_second: float | None
    mfu: float | None
    goodput: float | None
    checkpoint: int | None

    @property
    def share(self) -> float:
        """Share of the steps that are done, 0 to 1."""
        return min(max(self.step / self.total, 0.0), 1.0)


def figures(job: SeenJob) -> Figures | None:
    """Return the figures of the training; None before the first report of progress."""
    progress = job.status.progress
    if progress is None or progress.total_steps <= 0:
        return None
    return Figures(
        progress.step,
        progress.total_steps,
        decimal(progress.loss),
        decimal(progress.eval_loss),
        decimal(progress.initial_eval_loss),
        decimal(progress.tokens_per_second),
        decimal(progress.calculated_tokens_per_second),
        decimal(progress.mfu),
        decimal(progress.goodput),
        progress.checkpoint_step,
    )


def seconds_left(job: SeenJob, now: datetime) -> float | None:
    """Estimate the seconds until the last step from the pace since the first step, with interruptions; None if unknown."""
    progress = job.status.progress
    if progress is None or state(job) != Reason.RUNNING or stage_name(job) != Role.TRAIN:
        return None
    first, latest = moment(progress.first_step_time), moment(progress.advanced_time)
    if first is None or latest is None or progress.step <= 1 or latest <= first:
        return None
    pace = (latest - first).total_seconds() / (progress.step - 1)
    left = (progress.total_steps - progress.step) * pace - (now - latest).total_seconds()
    # If training should have ended by now, the estimate is meaningless.
    return left if left >= 0 else None


def seconds_between(start: str, end: str, now: datetime) -> float | None:
    """Return the seconds between two times in a status, or until now if the second is not set; None if the first is not set."""
    begun, ended = moment(start), moment(end) or now
    return None if begun is None else max((ended - begun).total_seconds(), 0.0)


def device_seconds(job: SeenJob, now: datetime) -> float:
    """Return the device seconds of the training pods: those that the status has counted, and an estimate for the time since.

    The estimate begins when all pods have a node. Earlier releases of the operator counted nothing.
    """
    counted, trained = job.status.gpu_seconds, find_condition(job.status.conditions, ConditionType.TRAINED)
    is_running = trained is not None and trained.reason == Reason.RUNNING
    since = job.status.gpu_seconds_until
    estimated = 0.0
    for attempt in job.attempts_of(Role.TRAIN):
        if (attempt.scheduled_time or attempt.running_time) and (is_running if not attempt.end_time else counted is None):
            # An elastic gang may have fewer ranks at times, but never more, whatever its status says.
            ranks = job.num_ranks if attempt.ranks is None else min(max(attempt.ranks, 1), job.num_ranks)
            begun = max(attempt.scheduled_time or attempt.start_time, since)
            estimated += (seconds_between(begun, attempt.end_time, now) or 0.0) * ranks
    return estimated if counted is None else estimated + counted.waiting + counted.productive + counted.lost


@dataclass(frozen=True)
class TimelineStage:
    """One row of a job's timeline."""

    name: str
    state: str
    """The condition's reason, or `done`."""
    message: str
    begun: datetime | None
    seconds: float | None
    """Total seconds of the stage's attempts, including the pauses between attempts."""
    attempts: tuple[Attempt, ...]


def timeline(job: SeenJob, now: datetime) -> list[TimelineStage]:
    """Return the rows of all stages, in order."""
    rows = []
    for kind, name in STAGE_NAMES.items():
        condition = find_condition(job.status.conditions, kind)
        if condition is None:
            continue
        attempts = tuple(attempt for attempt in job.status.attempts if attempt.role == name)
        begun = attempts[0].start_time if attempts else ""
        seconds = seconds_between(begun, attempts[-1].end_time, now) if attempts else None
        done = condition.status == "True" and condition.reason != Reason.SKIPPED
        rows.append(
            TimelineStage(name, "done" if done else condition.reason, condition.message, moment(begun), seconds, attempts)
        )
    return rows

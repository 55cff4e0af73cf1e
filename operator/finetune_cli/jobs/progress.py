"""Where a job is: its state and stage in one word each, how far it is, and when it will be done. `now` is the caller's clock."""

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
"""Stages in their order; each but the first is a `Role`."""
_UNDER_WAY = (
    Phase.FETCHING,
    Phase.PREFLIGHT,
    Phase.TRAINING,
    Phase.MERGING,
    Phase.PUBLISHING,
    Phase.FINISHING,
    NOT_SEEN,
)
"""Phases that say no more than the stage."""
_NOT_BEGUN = (Reason.PENDING, Reason.NOT_OBSERVED)


def current_stage(job: SeenJob) -> Condition | None:
    """The first stage that is not done; None if all are, or nothing is known."""
    conditions = (find_condition(job.status.conditions, kind) for kind in STAGES)
    return next((each for each in conditions if each is not None and each.status != "True"), None)


def stage_name(job: SeenJob) -> str:
    """Name of the current stage; empty if there is none."""
    stage = current_stage(job)
    return "" if stage is None else STAGE_NAMES[stage.type]


def state(job: SeenJob) -> str:
    """`Running`, what holds the job up (`Queued`, `Unschedulable`, ...), or how it has ended."""
    phase, stage = job.phase, current_stage(job)
    if phase not in _UNDER_WAY or stage is None or stage.reason in _NOT_BEGUN:
        return phase
    return stage.reason


@dataclass(frozen=True)
class Figures:
    """Numbers of the training as the status has them; None is not known."""

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
    """Figures of the training; None before the first report of progress."""
    progress = job.status.progress
    if progress is None or progress.total_steps <= 0:
        return None
    return Figures(
        step=progress.step,
        total=progress.total_steps,
        loss=decimal(progress.loss),
        eval_loss=decimal(progress.eval_loss),
        initial_eval_loss=decimal(progress.initial_eval_loss),
        tokens_per_second=decimal(progress.tokens_per_second),
        calculated_tokens_per_second=decimal(progress.calculated_tokens_per_second),
        mfu=decimal(progress.mfu),
        goodput=decimal(progress.goodput),
        checkpoint=progress.checkpoint_step,
    )


def seconds_left(job: SeenJob, now: datetime) -> float | None:
    """Seconds to the last step, at the pace since the first one, including interruptions; None while nothing trains or is due."""
    progress = job.status.progress
    if progress is None or state(job) != Reason.RUNNING or stage_name(job) != Role.TRAIN:
        return None
    first, latest = moment(progress.first_step_time), moment(progress.advanced_time)
    if first is None or latest is None or progress.step <= 1 or latest <= first:
        return None
    pace = (latest - first).total_seconds() / (progress.step - 1)
    left = (progress.total_steps - progress.step) * pace - (now - latest).total_seconds()
    # Long after it should have been done, nobody knows.
    return left if left >= 0 else None


def seconds_between(start: str, end: str, now: datetime) -> float | None:
    """Seconds between two times in a status, or until now if the second is not set; None without a first."""
    begun, ended = moment(start), moment(end) or now
    return None if begun is None else max((ended - begun).total_seconds(), 0.0)


def device_seconds(job: SeenJob, now: datetime) -> float:
    """Seconds of devices that the training pods held, from when all had a node."""
    return sum(
        (seconds_between(each.scheduled_time or each.start_time, each.end_time, now) or 0.0) * ranks_of(job, each)
        for each in job.attempts_of(Role.TRAIN)
        if each.scheduled_time or each.running_time
    )


def ranks_of(job: SeenJob, attempt: Attempt) -> int:
    """Ranks of one attempt: an elastic gang has fewer at times, and never more, whatever is written into its status."""
    return job.num_ranks if attempt.ranks is None else min(max(attempt.ranks, 1), job.num_ranks)


@dataclass(frozen=True)
class TimelineStage:
    """One row of a job's timeline."""

    name: str
    state: str
    """The condition's reason, or `done`."""
    message: str
    begun: datetime | None
    seconds: float | None
    """Over all its attempts, the pauses between them included."""
    attempts: tuple[Attempt, ...]


def timeline(job: SeenJob, now: datetime) -> list[TimelineStage]:
    """All stages in order."""
    rows = []
    for kind, name in STAGE_NAMES.items():
        condition = find_condition(job.status.conditions, kind)
        if condition is None:
            continue
        attempts = tuple(each for each in job.status.attempts if each.role == name)
        begun = attempts[0].start_time if attempts else ""
        seconds = seconds_between(begun, attempts[-1].end_time, now) if attempts else None
        done = condition.status == "True" and condition.reason != Reason.SKIPPED
        rows.append(
            TimelineStage(name, "done" if done else condition.reason, condition.message, moment(begun), seconds, attempts)
        )
    return rows

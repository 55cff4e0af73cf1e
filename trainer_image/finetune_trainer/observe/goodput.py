"""How a job has spent its time over all its attempts: on steps that count, and on everything else, by cause.

Each attempt writes records: one at its start, then the seconds that it has spent on each activity so far. Every second between
the start of the first attempt and the latest record has exactly one cause, so the parts add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError


class Activity(StrEnum):
    """Activity of rank 0, which has exactly one activity at a time."""

    STARTUP = "startup"
    """Time from the start of the process to the first step: imports, joining the gang, loading, and building the model."""
    STEPS = "steps"
    """Optimizer steps, without waiting for data."""
    DATA_WAIT = "data_wait"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    """The part of a save that steps wait for."""
    EXPORT = "export"
    OTHER = "other"


class Cause(StrEnum):
    """Cause of time in which no step that counts was done."""

    STARTUP = "startup"
    LOST_STEPS = "lost_steps"
    """Time of steps that had to be done again, because the run was resumed from an earlier step."""
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    DATA_WAIT = "data_wait"
    BETWEEN_ATTEMPTS = "between_attempts"
    """Time from an attempt's last record to the next attempt's start: steps after the record, scheduling, images, other pods."""
    EXPORT = "export"
    OTHER = "other"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    attempt: int
    time: float
    """Seconds since the epoch."""
    step: int
    """Number of optimizer steps done."""


class AttemptStarted(_Record):
    """Record that an attempt's process started at `time` and continues training after `step`."""

    kind: Literal["started"] = "started"
    world_size: int | None = None
    """Number of ranks of the attempt; None in records of older releases, which did not store it."""
    device: str | None = None
    """Device of rank 0: `cpu`, or the name of a GPU."""


class TimeSpent(_Record):
    """Record of the time that an attempt has spent so far. `time` is its start plus `seconds`, so clock changes are harmless."""

    kind: Literal["spent"] = "spent"
    seconds: Mapping[Activity, float]
    """Seconds by activity since the start of the attempt."""
    num_saves: int = 0
    """Number of checkpoints that the attempt has taken so far."""
    is_last: bool = False
    """Whether the attempt has ended by itself. A killed attempt leaves no such record."""


GoodputRecord = AttemptStarted | TimeSpent
_RECORD: TypeAdapter[GoodputRecord] = TypeAdapter(GoodputRecord)


@dataclass(frozen=True)
class GoodputTotals:
    """Totals of all attempts."""

    productive_seconds: float = 0.0
    badput_seconds: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        """Seconds since the start of the first attempt."""
        return self.productive_seconds + sum(self.badput_seconds.values())

    @property
    def goodput(self) -> float | None:
        """Productive share of the time, 0 to 1; None before any time has passed."""
        return self.productive_seconds / self.total_seconds if self.total_seconds > 0 else None

    def plus(self, seconds: Mapping[Activity, float]) -> GoodputTotals:
        """Return the totals with the seconds of a running attempt added; all of its steps count so far."""
        badput = dict(self.badput_seconds)
        for activity, spent in seconds.items():
            if activity is not Activity.STEPS:
                cause = Cause(activity.value)
                badput[cause] = badput.get(cause, 0.0) + spent
        return GoodputTotals(self.productive_seconds + seconds.get(Activity.STEPS, 0.0), badput)


@dataclass(frozen=True)
class AttemptLosses:
    """The number of attempts that lost steps or were killed, and the cost of all saves."""

    count: int = 0
    seconds: float = 0.0
    """Total time that all attempts have run, in seconds."""
    save_seconds: float = 0.0
    num_saves: int = 0

    def plus(self, seconds: Mapping[Activity, float], num_saves: int) -> AttemptLosses:
        """Return the losses with the time and the saves of a running attempt added."""
        return AttemptLosses(
            self.count,
            self.seconds + sum(seconds.values()),
            self.save_seconds + seconds.get(Activity.CHECKPOINT, 0.0),
            self.num_saves + num_saves,
        )


def attempt_losses(records: Sequence[GoodputRecord]) -> AttemptLosses:
    """Add up the losses of all attempts except the one that the last record starts.

    An attempt has lost nothing if it ended by itself and the next attempt continued after its last step.
    """
    losses = AttemptLosses()
    latest: GoodputRecord | None = None
    for record in records:
        if isinstance(record, AttemptStarted) and latest is not None:
            is_whole = isinstance(latest, TimeSpent) and latest.is_last and record.step >= latest.step
            spent = latest if isinstance(latest, TimeSpent) else None
            losses = replace(losses, count=losses.count + (not is_whole))
            losses = losses.plus(spent.seconds, spent.num_saves) if spent else losses
        if isinstance(record, AttemptStarted) or (latest is not None and record.attempt == latest.attempt):
            latest = record
    return losses


def parse_records(lines: Iterable[Mapping[str, Any]]) -> list[GoodputRecord]:
    """Return the records among these lines; other lines are skipped."""
    records = []
    for line in lines:
        try:
            records.append(_RECORD.validate_python(line))
        except ValidationError:
            continue
    return records


def starts_and_ends(records: Iterable[GoodputRecord]) -> list[tuple[AttemptStarted, GoodputRecord]]:
    """Return the start and the last record of each attempt, in order."""
    pairs: list[tuple[AttemptStarted, GoodputRecord]] = []
    for record in records:
        if isinstance(record, AttemptStarted):
            pairs.append((record, record))
        elif pairs:
            pairs[-1] = pairs[-1][0], record
    return pairs


@dataclass(frozen=True)
class _Stretch:
    """The steps after `first`, up to and including `last`, which took `seconds`."""

    first: int
    last: int
    seconds: float

    def up_to(self, step: int) -> _Stretch:
        """Return the part up to `step`, assuming that all steps take equally long."""
        last = max(min(self.last, step), self.first)
        length = self.last - self.first
        share = (last - self.first) / length if length else float(self.last <= step)
        return _Stretch(self.first, last, self.seconds * share)


def goodput_totals(records: Sequence[GoodputRecord]) -> GoodputTotals:
    """Add up the time of all attempts. The records are in the order in which they were written.

    If clocks of different machines disagree, an attempt may seem to start before the previous one ended. The time
    between them then counts as zero.
    """
    total = GoodputTotals()
    kept: list[_Stretch] = []
    lost = between = 0.0
    latest: GoodputRecord | None = None
    for record in records:
        if isinstance(record, AttemptStarted):
            between += max(0.0, record.time - latest.time) if latest else 0.0
            shortened = [stretch.up_to(record.step) for stretch in kept]
            lost += sum(stretch.seconds for stretch in kept) - sum(stretch.seconds for stretch in shortened)
            kept = shortened
        elif latest is None or record.attempt != latest.attempt:
            continue
        else:
            before = latest.seconds if isinstance(latest, TimeSpent) else {}
            spent = {activity: seconds - before.get(activity, 0.0) for activity, seconds in record.seconds.items()}
            kept.append(_Stretch(latest.step, record.step, spent.pop(Activity.STEPS, 0.0)))
            total = total.plus(spent)
        latest = record
    badput = {Cause.LOST_STEPS: lost, Cause.BETWEEN_ATTEMPTS: between, **total.badput_seconds}
    return GoodputTotals(sum(stretch.seconds for stretch in kept), {cause: badput.get(cause, 0.0) for cause in Cause})

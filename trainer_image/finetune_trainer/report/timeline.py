"""Course of a run: its attempts, how each ended, and how time was spent, read from the files that the attempts left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from finetune_job.failures import TerminationReport
from finetune_job.layout import WorkspaceLayout
from finetune_job.names import Role
from finetune_trainer.files import read_own
from finetune_trainer.inspection.report import ModelReport
from finetune_trainer.json_lines import read_lines
from finetune_trainer.observe.goodput import GoodputRecord, GoodputTotals, goodput_totals, parse_records, starts_and_ends
from finetune_trainer.ranks.reports import read_rank_reports, root_cause

FINISHED, ENDED_SILENTLY = "finished", "ended without a report"


@dataclass(frozen=True)
class TrainingAttempt:
    """One process of rank 0 from start to end."""

    number: int
    start: float
    """Seconds since the epoch."""
    seconds: float
    """Seconds until its last record."""
    first_step: int
    """Step after which it continued."""
    last_step: int
    """Step of its last record."""
    lost_steps: int
    """Number of its recorded steps that the next attempt had to do again."""
    ending: str
    message: str = ""
    """Message of the failure."""


@dataclass(frozen=True)
class Timeline:
    """The course of a run for the report. preflight: None if it left no report."""

    attempts: tuple[TrainingAttempt, ...] = ()
    goodput: GoodputTotals = field(default_factory=GoodputTotals)
    preflight: ModelReport | None = None

    @property
    def lost_steps(self) -> int:
        return sum(attempt.lost_steps for attempt in self.attempts)


def read_timeline(workspace: WorkspaceLayout, preflight: ModelReport | None) -> Timeline:
    """Read the course of a finished run. Missing or unreadable parts are left out. Raises OSError."""
    text = read_own(workspace.accounts).decode(errors="replace") if workspace.accounts.is_file() else ""
    records = parse_records(read_lines(text))
    numbers = {record.attempt for record in records}
    reports = {number: read_rank_reports(workspace.reports(Role.TRAIN, number)) for number in numbers}
    return Timeline(tuple(attempts_of(records, reports)), goodput_totals(records), preflight)


def attempts_of(records: Iterable[GoodputRecord], reports: Mapping[int, Sequence[TerminationReport]]) -> list[TrainingAttempt]:
    """The attempts in their order. reports: of ranks, by number of the attempt."""
    attempts = starts_and_ends(records)
    training_attempts = []
    for position, (start, last) in enumerate(attempts):
        following = attempts[position + 1][0] if position + 1 < len(attempts) else None
        ending, message = FINISHED, ""
        if following is not None:
            cause = root_cause(reports.get(start.attempt, ()))
            ending = ENDED_SILENTLY if cause is None or cause.failure is None else cause.failure.value
            message = "" if cause is None else cause.message
        training_attempts.append(
            TrainingAttempt(
                number=start.attempt,
                start=start.time,
                seconds=max(0.0, last.time - start.time),
                first_step=start.step,
                last_step=last.step,
                lost_steps=max(0, last.step - following.step) if following is not None else 0,
                ending=ending,
                message=message,
            )
        )
    return training_attempts

"""The course of a run, read from files that its attempts left: the attempts, how each ended, and how time was spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from finetune_job.failures import RankRestart, TerminationReport
from finetune_job.layout import WorkspaceLayout
from finetune_job.names import Role
from finetune_trainer.files import read_own
from finetune_trainer.inspection.report import ModelReport
from finetune_trainer.json_lines import read_lines
from finetune_trainer.observe.goodput import GoodputRecord, GoodputTotals, goodput_totals, parse_records, starts_and_ends
from finetune_trainer.ranks.reports import read_rank_reports, root_cause
from finetune_trainer.ranks.restarts import read_restarts
from finetune_trainer.report.document import TrainingAttempt

FINISHED, ENDED_SILENTLY = "finished", "ended without a report"


@dataclass(frozen=True)
class Timeline:
    """The course of a run for the report. preflight: the report of preflight; None if it left none."""

    attempts: tuple[TrainingAttempt, ...] = ()
    goodput: GoodputTotals = field(default_factory=GoodputTotals)
    preflight: ModelReport | None = None

    @property
    def lost_steps(self) -> int | None:
        lost = [attempt.lost_steps for attempt in self.attempts]
        return None if None in lost else sum(filter(None, lost))


def read_timeline(workspace: WorkspaceLayout, preflight: ModelReport | None) -> Timeline:
    """Read the course of a finished run; missing and unreadable parts are left out. Raises OSError."""
    text = read_own(workspace.accounts).decode(errors="replace") if workspace.accounts.is_file() else ""
    records = parse_records(read_lines(text))
    numbers = {record.attempt for record in records}
    reports = {number: read_rank_reports(workspace.reports(Role.TRAIN, number)) for number in numbers}
    restarts = {number: read_restarts(workspace.restarts(number)) for number in numbers}
    return Timeline(tuple(attempts_of(records, reports, restarts)), goodput_totals(records), preflight)


def attempts_of(
    records: Iterable[GoodputRecord],
    reports: Mapping[int, Sequence[TerminationReport]],
    restarts: Mapping[int, Sequence[RankRestart]],
) -> list[TrainingAttempt]:
    """List the processes of rank 0 in order.

    Args:
        records: All goodput records.
        reports: Attempt number -> reports of the attempt's ranks.
        restarts: Attempt number -> restarts of the attempt's ranks in their pod.
    """
    attempts = starts_and_ends(records)
    training_attempts = []
    for position, (start, last) in enumerate(attempts):
        following = attempts[position + 1][0] if position + 1 < len(attempts) else None
        ending, message = FINISHED, ""
        if following is not None:
            cause: TerminationReport | RankRestart | None = root_cause(reports.get(start.attempt, ()))
            if following.attempt == start.attempt:
                cause = next(
                    (restart for restart in restarts.get(start.attempt, ()) if start.time <= restart.time <= following.time), None
                )
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

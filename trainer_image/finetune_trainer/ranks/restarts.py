"""Restarts of a one-pod gang by its supervisor: when one is allowed, what is kept of the failed run, and how it is recorded.

The supervisor started the ranks and has seen all of them end, so no other process can write for the same attempt, and there is no
need to ask the operator. The record reaches the operator with the restarted ranks' progress, or with the pod's report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from finetune_job.failures import MOST_RESTARTS_IN_POD, PROCESS_FAILURES, FailureClass, Outcome, RankRestart, TerminationReport
from finetune_job.names import Role
from finetune_trainer.context import RunContext
from finetune_trainer.files import read_own, remove_tree, write_durably
from finetune_trainer.ranks.reports import remove_rank_reports
from finetune_trainer.ranks.stalls import remove_traces

_RESTARTS: TypeAdapter[list[RankRestart]] = TypeAdapter(list[RankRestart])


def restart_after(report: TerminationReport, *, num_restarts: int, most: int, now: float) -> RankRestart | None:
    """Return the restart within the pod that follows this report of the node; None if no restart is allowed.

    Args:
        report: How the ranks ended.
        num_restarts: Number of earlier restarts in this attempt.
        most: Maximum number of restarts in this attempt.
        now: Seconds since the epoch. The report does not give this time: an echo is dated later than it was written.
    """
    failure = report.failure
    if num_restarts >= most or report.outcome is not Outcome.FAILED or failure not in PROCESS_FAILURES:
        return None
    if failure is FailureClass.STALLED and report.step is None:
        # The ranks never joined. That is the pod's fault and does not count against the job, so the operator handles it.
        return None
    message = report.message or report.exception.strip().rpartition("\n")[2] or str(failure)
    return RankRestart(failure=failure, message=message, rank=report.rank, step=report.step, time=now)


def remove_traces_of_ranks(context: RunContext, ranks: Iterable[int]) -> None:
    """Remove these ranks' reports and traces that an earlier run of the same attempt left behind. Raises OSError."""
    numbers = tuple(ranks)
    remove_rank_reports(context.workspace.reports(Role.TRAIN.value, context.attempt), numbers)
    remove_traces(context.workspace.stacks(context.attempt), numbers)


def set_traces_aside(context: RunContext, number: int) -> None:
    """Keep reports and stacks of the ranks that failed before restart `number`, by renaming their directories. Raises OSError."""
    for directory in (context.workspace.reports(Role.TRAIN.value, context.attempt), context.workspace.stacks(context.attempt)):
        if directory.is_dir():
            kept = directory.with_name(f"{directory.name}-before-restart-{number}")
            remove_tree(kept)
            directory.rename(kept)


def write_restarts(path: Path, restarts: Sequence[RankRestart]) -> None:
    """Record the restarts of an attempt. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, _RESTARTS.dump_json(list(restarts)))


def read_restarts(path: Path) -> list[RankRestart]:
    """Return the restarts of an attempt; empty if no record can be read."""
    try:
        return _RESTARTS.validate_json(read_own(path))[:MOST_RESTARTS_IN_POD]
    except (OSError, ValidationError):
        return []

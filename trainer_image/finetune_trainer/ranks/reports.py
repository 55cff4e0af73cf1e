"""Reports of ranks on the workspace, and the choice of the report that names the root cause.

A failed collective is usually the echo of another rank's failure. So a rank whose collective failed waits before it exits, so
that the culprit exits first, and dates its report to the end of that wait. The gang's earliest report then names the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_job.failures import FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_trainer.files import read_own, write_durably

ECHO_SECONDS = 15.0
"""Time that a rank waits, after its collective failed, for the cause to show. Agents notice a dead rank within a second."""
_NCCL = "ProcessGroupNCCL"
_FAILED_RANK = re.compile(r"^\s*rank\s*:\s*(\d+)\s*\(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)


def rank_report_name(rank: int) -> str:
    """File name of a rank's report."""
    return f"rank-{rank:05d}.json"


def rank_process_name(rank: int) -> str:
    """Name of a rank's process, by which the supervisor recognises the rank."""
    return f"rank-{rank:05d}"


def write_rank_report(directory: Path, report: TerminationReport) -> None:
    """Write a rank's report. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(directory / rank_report_name(report.rank or 0), report.model_dump_json(indent=2).encode())


def read_rank_reports(directory: Path) -> list[TerminationReport]:
    """Return the reports of this attempt's ranks on all nodes."""
    if not directory.is_dir():
        return []
    read = (_read_report(path) for path in sorted(directory.glob("rank-*.json")))
    return [report for report in read if report is not None]


def _read_report(path: Path) -> TerminationReport | None:
    try:
        return parse_envelope(read_own(path).decode(errors="replace"))
    except OSError:
        return None


def remove_rank_reports(directory: Path, ranks: Iterable[int]) -> None:
    """Remove these ranks' reports that an earlier run of the same attempt left behind."""
    for rank in ranks:
        (directory / rank_report_name(rank)).unlink(missing_ok=True)


def date_echo(report: TerminationReport) -> TerminationReport:
    """Date the report of a failed collective to the end of the rank's wait; return other reports unchanged."""
    if report.failure is not FailureClass.COLLECTIVE:
        return report
    return report.model_copy(update={"time": report.time + ECHO_SECONDS})


def root_cause(reports: Iterable[TerminationReport]) -> TerminationReport | None:
    """Return the earliest failure, or that of the lowest rank if times are equal; None if no rank failed."""
    failed = [report for report in reports if report.outcome is not Outcome.SUCCEEDED]
    return min(failed, key=lambda report: (report.time, report.rank or 0), default=None)


def failed_ranks(torchrun_output: str) -> dict[int, int]:
    """Return global rank -> exit code (negative: signal number), from the summary that torchrun prints when ranks fail."""
    return {int(rank): int(code) for rank, code in _FAILED_RANK.findall(torchrun_output)}


@dataclass(frozen=True)
class SilentEvidence:
    """Evidence about ranks that exited without a report."""

    role: str
    attempt: int
    node_rank: int
    is_out_of_memory: bool
    """Whether the kernel killed a process of this container for lack of memory."""
    log_ends: Mapping[int, str]
    """Rank -> the end of that rank's output."""
    now: float
    """Seconds since the epoch."""


def silent_failures(
    exit_codes: Mapping[int, int], reports: Iterable[TerminationReport], evidence: SilentEvidence
) -> list[TerminationReport]:
    """Make reports for the ranks that failed without a report."""
    reported = {report.rank for report in reports}
    silent_reports = []
    for rank, code in sorted(exit_codes.items()):
        if rank in reported or code == 0:
            continue
        failure, hint = FailureClass.INTERNAL, "see the rank's log on the workspace"
        message = (
            f"rank {rank} was killed by signal {-code}" if code < 0 else f"rank {rank} exited with code {code} without a report"
        )
        if code == -signal.SIGKILL and evidence.is_out_of_memory:
            failure, hint = FailureClass.HOST_OUT_OF_MEMORY, "raise the memory of the profile's resources"
            message += ", because the container's memory was used up"
        elif code == -signal.SIGABRT and _NCCL in evidence.log_ends.get(rank, ""):
            # If a collective fails, NCCL's watchdog kills the process before Python sees the error.
            failure = FailureClass.COLLECTIVE
            message += ", sent by NCCL's watchdog after a collective failed"
        report = TerminationReport(
            role=evidence.role,
            attempt=evidence.attempt,
            outcome=Outcome.FAILED,
            failure=failure,
            message=message,
            hint=hint,
            rank=rank,
            node_rank=evidence.node_rank,
            time=evidence.now,
        )
        silent_reports.append(date_echo(report))
    return silent_reports

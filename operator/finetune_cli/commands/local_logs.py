"""`finetune logs` of a run on this machine, from the output of its roles in the run's directory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import IO

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.jobs.plain import harmless
from finetune_cli.jobs.pod_logs import LogRequest, is_of_rank
from finetune_cli.local.known_runs import KnownRun
from finetune_cli.local.run_directory import holder_of
from finetune_job.failures import Outcome, parse_envelope
from finetune_job.names import Role

_POLL_SECONDS = 0.2
_MOST_LINE_BYTES = 1 << 20


def local_log_lines(run: KnownRun, request: LogRequest) -> Iterator[str]:
    """Yield the escaped lines of one attempt; with `follow`, until no process works on the run. Raises LocalError."""
    path = run.place.output(*_attempt(run, request))
    try:
        with path.open("rb") as file:
            is_over = not request.follow or holder_of(run.place) is None
            yield from deque(_lines(file, request.rank, is_over=is_over), maxlen=request.tail)
            while not is_over:
                time.sleep(_POLL_SECONDS)
                is_over = holder_of(run.place) is None
                yield from _lines(file, request.rank, is_over=is_over)
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}", ExitCode.FAILED) from error


def _lines(file: IO[bytes], rank: int | None, *, is_over: bool) -> Iterator[str]:
    """Yield the complete lines from the current position to the end, and an incomplete last line if the run is over."""
    while line := file.readline(_MOST_LINE_BYTES):
        if not is_over and not line.endswith(b"\n") and len(line) < _MOST_LINE_BYTES:
            file.seek(-len(line), 1)
            return
        text = line.decode(errors="replace").rstrip("\n")
        if is_of_rank(text, rank):
            yield harmless(text)


def _attempt(run: KnownRun, request: LogRequest) -> tuple[Role, int]:
    """Return stage and number of the attempt; by default, the latest of the current stage, or of the last stage tried."""
    tried = [role for role in Role if run.record.next_attempt.get(role, 0)]
    stage = request.stage or run.record.stage or (tried[-1] if tried else Role.FETCH)
    attempts = [number for number in range(run.record.next_attempt.get(stage, 0)) if run.place.output(stage, number).is_file()]
    if request.failed:
        attempts = [number for number in attempts if _has_failed(run, stage, number)]
    wanted = request.attempt if request.attempt is not None else max(attempts, default=None)
    if wanted is None or wanted not in attempts:
        which = f"failed attempt of {stage}" if request.failed else f"attempt of {stage}"
        there = f"there are {', '.join(map(str, attempts))}" if attempts else "there is none"
        named = "" if request.attempt is None else f" {request.attempt}"
        raise LocalError(f"{run.title}: no {which}{named} has a log below {run.place.root}; {there}", ExitCode.FAILED)
    return stage, wanted


def _has_failed(run: KnownRun, stage: Role, attempt: int) -> bool:
    try:
        report = parse_envelope(run.place.termination_log(stage, attempt).read_text(errors="replace"))
    except OSError:
        report = None
    if report is not None:
        return report.outcome is not Outcome.SUCCEEDED
    # The attempt is running, or has ended without a report.
    return run.holder is None or attempt + 1 < run.record.next_attempt[stage]

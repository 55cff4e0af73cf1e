"""What preparing data has to tell the user, as findings of preflight: file, line, key, value, reason, fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finetune_job.api.base import ClaimPath
from finetune_job.rules.rule import Finding
from finetune_trainer.data.read import RecordProblem

MAX_KINDS = 10
"""Kinds of mistakes reported per file; a file with more is most likely another kind of file."""


@dataclass(frozen=True)
class SplitSource:
    """One file of records: where it is, and where the user named it."""

    split: str
    location: ClaimPath
    path: Path
    field: str
    """`spec.data.source` or `spec.data.validation.source`."""

    @property
    def address(self) -> str:
        """`pvc://claim/path`, as the user wrote it."""
        return f"pvc://{self.location.claim}/{self.location.path}"


def unreadable(source: SplitSource, error: OSError) -> Finding:
    """The file is missing, a directory, or may not be read."""
    if isinstance(error, FileNotFoundError):
        missing = f"the file does not exist on claim {source.location.claim}"
        siblings = sorted(path.name for path in source.path.parent.glob("*")) if source.path.parent.is_dir() else []
        beside = f"; its directory holds {', '.join(siblings[:8])}" if siblings else ""
        return _finding(source, "data-file-missing", missing + beside, "put the file there or correct the path")
    if isinstance(error, IsADirectoryError):
        return _finding(source, "data-file-unreadable", "is a directory", "name one JSON Lines file in it")
    return _finding(
        source,
        "data-file-unreadable",
        f"cannot be read ({error.strerror or error})",
        "let the group of the pods (the profile's fsGroup) read the file",
    )


def empty(source: SplitSource) -> Finding:
    """No record at all."""
    return _finding(source, "data-empty", "the file holds no record", "name a file with at least one record per line")


def wrong_records(source: SplitSource, problems: Iterable[tuple[RecordProblem, int]]) -> list[Finding]:
    """A finding per kind of mistake: its first line, and on how many lines it was found."""
    findings = []
    for problem, count in problems:
        key = f" key {problem.key!r}" if problem.key else ""
        more = f" (and the same on {count - 1} more lines)" if count > 1 else ""
        findings.append(
            Finding(
                rule="data-record-invalid",
                severity="error",
                field=source.field,
                value=problem.value,
                message=f"{source.address} line {problem.line}:{key} {problem.reason}{more}",
                fix=problem.fix,
            )
        )
    return findings


def too_long(source: SplitSource, num_records: int, num_dropped: int, shortest: int, limit: int) -> Finding:
    """Records beyond maxSequenceLength: some (they are dropped) or all of them (nothing is left)."""
    everything = num_dropped == num_records
    message = (
        f"{source.address}: all {num_records} records are longer than {limit} tokens, so nothing is left"
        if everything
        else f"{source.address}: {num_dropped} of {num_records} records are longer than {limit} tokens and are dropped"
    )
    return Finding(
        rule="data-all-too-long" if everything else "data-records-dropped",
        severity="error" if everything else "warning",
        field="spec.data.maxSequenceLength",
        value=str(limit),
        message=f"{message}; the shortest of them has {shortest}",
        fix=f"raise spec.data.maxSequenceLength to {shortest} or more, or split long records",
    )


def _finding(source: SplitSource, rule: str, message: str, fix: str) -> Finding:
    return Finding(rule=rule, severity="error", field=source.field, value=source.address, message=message, fix=fix)

"""Verification, start to end, and what becomes of a model that fails. The way in for the merge role, the CLI and tests."""

import time
from collections.abc import Sequence
from pathlib import Path

from finetune_trainer.verify.gate import Gate, LogitFigures, failures
from finetune_trainer.verify.logits import compare_logits
from finetune_trainer.verify.report import VerificationReport
from finetune_trainer.verify.tensors import check_tensors


def verify_merge(
    *, base: Path, adapter: Path, merged: Path, prompts: Sequence[Sequence[int]], gate: Gate, report_path: Path
) -> VerificationReport:
    """Checks tensors, then logits if the tensors are right, and writes the report.

    prompts: held-out token ids. gate: see gate.gate_for. The caller quarantines `merged` when `passed` is False.
    Raises MergeError when a directory cannot be read, ValueError for empty prompts.
    """
    started = time.monotonic()
    tensors = check_tensors(base, adapter, merged)
    faults = tuple(tensors.faults)
    logits: LogitFigures | None = None
    if not faults:
        logits = compare_logits(base, adapter, merged, prompts, scratch=report_path.parent)
        faults = failures(logits, gate)
    report = VerificationReport(
        passed=not faults,
        faults=faults,
        tensors=tensors,
        logits=logits,
        gate=gate,
        seconds=time.monotonic() - started,
    )
    report.write(report_path)
    return report


def quarantine(path: Path, kept: Path) -> Path:
    """Rename a failed model to `kept`, numbered where that exists already, and return the new path. Nothing is deleted."""
    target, number = kept, 1
    while target.exists():
        number += 1
        target = kept.with_name(f"{kept.name}-{number}")
    return path.rename(target)

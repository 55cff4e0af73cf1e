"""What a rehearsal comes to. Without torch, because preflight and the command line hold it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from finetune_job.rules.rule import Finding


class Verdict(StrEnum):
    """How a rehearsal ended."""

    PASSED = "Passed"
    FAILED = "Failed"
    """The job would fail, or go wrong silently: a finding says where."""
    NOT_DONE = "NotDone"
    """No twin could be built, or time or memory ran out: a warning says why. What was seen until then was right."""
    SKIPPED = "Skipped"
    """spec.preflight.rehearsal: Skip."""


class Stage(StrEnum):
    """What is tried, in order."""

    BUILD = "build"
    """The twin, its adapter and its data."""
    TRAIN = "train"
    """An undisturbed run: a few steps with checkpoints, and the result."""
    RESUME = "resume"
    """The same run killed after a checkpoint, and resumed: the same bytes."""
    COMPARE = "compare"
    """The same global batches in one process: the same losses and gradients."""
    SAVE = "save"
    """The result holds what was trained, and loads with the libraries alone."""
    MERGE = "merge"
    """Merge and verification."""


TITLES = {
    Stage.BUILD: "build the twin",
    Stage.TRAIN: "train and save",
    Stage.RESUME: "kill, resume, compare bytes",
    Stage.COMPARE: "compare with one process",
    Stage.SAVE: "load what was saved",
    Stage.MERGE: "merge and verify",
}


class Record(BaseModel):
    """Immutable; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StageResult(Record):
    """How one stage went."""

    stage: Stage
    seconds: float
    """The last three run beside each other, so those of all stages are more than those of the rehearsal."""
    problem: str = ""
    """Empty: it went well."""


class RehearsalReport(Record):
    """Part of the model report."""

    verdict: Verdict
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    """Of all its processes together, pages that they share counted once (PSS)."""
    parameters: int = 0
    """Of the twin."""
    changes: tuple[str, ...] = ()
    """What differs between the job and its rehearsal, in words."""
    stages: tuple[StageResult, ...] = ()
    findings: tuple[Finding, ...] = ()


SKIPPED = RehearsalReport(verdict=Verdict.SKIPPED)

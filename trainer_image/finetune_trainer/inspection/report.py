"""Defines what preflight knows about a model, in plain values: its structure, the rehearsal, and the report on the workspace.

Does not import torch, because preflight keeps these values while it prepares the data, and merge and publish read the report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from finetune_job.finding import Finding
from finetune_job.plan.run_plan import Choice, RunPlan
from finetune_memory.model_shape import ModelShape
from finetune_trainer.errors import PlanMismatchError
from finetune_trainer.files import read_own

_SHOWN = 60


@dataclass(frozen=True)
class ModelStructure:
    """The structure of the model that the trainer will build."""

    wrap_classes: tuple[str, ...]
    fsdp_units: tuple[str, ...]
    dtypes: dict[str, str]
    trainable: dict[str, tuple[int, ...]]
    saved_tensors: dict[str, tuple[int, ...]]
    fixed_tensors: dict[str, tuple[int, ...]]
    """Tensors of the adapter that are not trained, such as random projections."""
    adapter_settings: dict[str, Any] | None
    """The content of adapter_config.json; None for full fine-tuning."""
    vocabulary_size: int
    """Number of rows of the input embedding."""
    max_positions: int | None
    """Longest document for which the model was made, in tokens; None if its configuration does not say."""
    max_row: int | None
    """Longest row of a batch, with all documents packed into it, that the model's code supports; None if there is no limit."""
    stored_dtype: str
    """Element type of most of the base model's weights."""
    shape: ModelShape | None
    """The shape for the memory planner; None if the planner does not know the model's configuration."""
    trains_input_rows_alone: bool = False
    """Whether input embedding rows are trained that the head does not share, and so learn only where their token is read."""
    batches: tuple[Choice, ...] = ()
    """The choices of precision, attention, micro-batch and recomputation that the plan leaves unset."""
    padding_row: int | None = None
    """Row of the input embedding for which torch computes no gradient (`padding_idx`)."""


class Verdict(StrEnum):
    """The result of a rehearsal."""

    PASSED = "Passed"
    FAILED = "Failed"
    """The job would fail or silently go wrong, as a finding explains."""
    NOT_DONE = "NotDone"
    """No scaled-down model could be built, or time or memory ran out, as a warning explains. No stage had failed before."""
    SKIPPED = "Skipped"
    """The manifest has spec.preflight.rehearsal: Skip."""


class Stage(StrEnum):
    """The stages of a rehearsal, in order."""

    BUILD = "build"
    """Build the scaled-down model, its adapter and its data."""
    TRAIN = "train"
    """Train for a few steps without interruption, with checkpoints, and save the result."""
    RESUME = "resume"
    """Resume this run from a checkpoint; the result must have the same bytes."""
    COMPARE = "compare"
    """Train on the same global batches in one process; losses and gradients must be the same."""
    SAVE = "save"
    """Check that the result holds what was trained and can be loaded with the libraries alone."""
    MERGE = "merge"
    """Merge and verify."""


TITLES = {
    Stage.BUILD: "build the scaled-down model",
    Stage.TRAIN: "train and save",
    Stage.RESUME: "resume from a checkpoint, compare bytes",
    Stage.COMPARE: "compare with one process",
    Stage.SAVE: "load what was saved",
    Stage.MERGE: "merge and verify",
}


class StrictModel(BaseModel):
    """Base class of immutable models that refuse unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StageResult(StrictModel):
    """The result of one stage."""

    stage: Stage
    seconds: float
    """Duration of the stage. The last three stages run at the same time, so the sum exceeds the duration of the rehearsal."""
    problem: str = ""
    """Description of the failure; empty if the stage passed."""


class RehearsalReport(StrictModel):
    """The rehearsal's part of the model report."""

    verdict: Verdict
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    """Peak memory of all processes of the rehearsal together; shared pages are counted once (PSS)."""
    parameters: int = 0
    """Number of parameters of the scaled-down model."""
    changes: tuple[str, ...] = ()
    """Descriptions of the differences between the job and its rehearsal."""
    stages: tuple[StageResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    kept_since: str = ""
    """UTC time of the earlier, equal rehearsal whose verdict is reused (rehearsal/verdicts.py); empty if none is reused."""


SKIPPED = RehearsalReport(verdict=Verdict.SKIPPED)


class ModelReport(BaseModel):
    """The content of the file `WorkspaceLayout.model_report`. Names and shapes are those before sharding."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    plan_sha256: str
    model_digest: str
    """SHA-256 over configuration, index, headers and file sizes of the base model, computed without reading weights."""
    model_files: dict[str, str]
    """SHA-256 of configuration and weight files, which the merge checks; empty if nothing is merged."""
    data_hash: str
    wrap_classes: tuple[str, ...]
    """Layer classes that become FSDP units; empty unless the policy is TRANSFORMER_BASED_WRAP."""
    fsdp_units: tuple[str, ...]
    """Names of the modules that become FSDP units, without the root, which is also a unit."""
    dtypes: dict[str, str]
    """Use (load, param, reduce, save) -> element type."""
    trainable: dict[str, tuple[int, ...]]
    """Name -> shape of each trained parameter."""
    saved_tensors: dict[str, tuple[int, ...]]
    """Name -> shape of each tensor that the trained adapter (or model) must contain."""
    train_sequences: int
    supervised_tokens: int
    """Number of tokens that contribute to the loss in one pass over the training data."""
    total_steps: int
    record_lengths: dict[int, int]
    """Histogram of training records: length rounded up to a power of two -> number of records, including dropped ones."""
    rehearsal: RehearsalReport = SKIPPED
    """The result of rehearsing the job on a scaled-down model of the same architecture."""
    memory: dict[str, int]
    """Purpose -> estimated bytes of memory that a rank will need; empty if they could not be estimated."""
    resharding: Choice | None = None
    """Whether ranks free gathered parameters after the forward pass, and why; None if the plan sets it, or there is one rank."""
    batches: tuple[Choice, ...] = ()
    """The choices of precision, attention, micro-batch and recomputation, and why; empty if the plan sets them all."""
    warnings: tuple[Finding, ...]

    @property
    def trainable_parameters(self) -> int:
        """Number of trained values."""
        return sum(math.prod(shape) for shape in self.trainable.values())


def _changed(path: Path, what: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"{path.name} on the workspace {what}: another program has written it",
        "create the job again with an empty workspace, and keep other writers off the claim",
    )


def read_report(path: Path) -> ModelReport | None:
    """Read the report at `path`; None if there is none."""
    return ModelReport.model_validate_json(read_own(path)) if path.is_file() else None


def with_choices_of_preflight(plan: RunPlan, path: Path) -> RunPlan:
    """Return the plan with preflight's choices from the report at `path`, which are the same for every attempt.

    If preflight has made no choice, ranks free gathered parameters after the forward pass, which takes the least memory. Raises
    PlanMismatchError if the report contains anything that preflight never writes, since other programs may write there.
    """
    try:
        report = read_report(path)
    except ValueError as error:
        raise _changed(path, "is not a report of preflight") from error
    frees = report is None or report.resharding is None or report.resharding.value is not False
    if report is not None:
        written = [*report.batches, *([] if report.resharding is None else [report.resharding])]
        wrong = plan.wrong_choice(written)
        if wrong is not None:
            raise _changed(path, f"says {wrong.field}: {str(wrong.value)[:_SHOWN]}, which preflight never chooses for this job")
        plan = plan.with_choices(report.batches)
    return plan.with_fsdp(reshard_after_forward=frees) if plan.parallelism.leaves_resharding_open else plan

"""Preflight's knowledge of a model in plain values: its structure, how the rehearsal went, and the report on the workspace.

Without torch, because preflight holds these while it prepares the data, and the merge and the publisher read the report.
"""

from __future__ import annotations

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
    """Structure that the trainer will build."""

    wrap_classes: tuple[str, ...]
    fsdp_units: tuple[str, ...]
    dtypes: dict[str, str]
    trainable: dict[str, tuple[int, ...]]
    saved_tensors: dict[str, tuple[int, ...]]
    fixed_tensors: dict[str, tuple[int, ...]]
    """Tensors of the adapter that are not trained, such as random projections."""
    adapter_settings: dict[str, Any] | None
    """Content of adapter_config.json; None for full fine-tuning."""
    vocabulary_size: int
    """Rows of the input embedding."""
    max_positions: int | None
    """Longest document that the model was made for, if its configuration says so."""
    max_row: int | None
    """Longest row of a batch, with all documents packed into it, that the model's code computes; None: any."""
    stored_dtype: str
    """Element type of most of the base model's weights."""
    shape: ModelShape | None
    """Shape for the memory planner; None if the configuration does not contain enough for it."""
    trains_input_rows_alone: bool = False
    """Whether rows of the input embedding are trained that no output head shares: a row then learns where its token is read."""
    batches: tuple[Choice, ...] = ()
    """Attention, micro-batch and recomputation, if the plan leaves them open."""
    padding_row: int | None = None
    """Row of the input embedding that torch gives no gradient (`padding_idx`)."""


class Verdict(StrEnum):
    """How a rehearsal ended."""

    PASSED = "Passed"
    FAILED = "Failed"
    """The job would fail, or go wrong silently: a finding says where."""
    NOT_DONE = "NotDone"
    """No scaled-down model could be built, or time or memory ran out: a warning says why. Everything seen until then was
    right.
    """
    SKIPPED = "Skipped"
    """The manifest has spec.preflight.rehearsal: Skip."""


class Stage(StrEnum):
    """Stages of a rehearsal, in order."""

    BUILD = "build"
    """The scaled-down model, its adapter and its data."""
    TRAIN = "train"
    """An undisturbed run: a few steps with checkpoints, and the result."""
    RESUME = "resume"
    """A resume of this run from a checkpoint, which gives the same bytes."""
    COMPARE = "compare"
    """A run of these global batches in one process, which gives the same losses and gradients."""
    SAVE = "save"
    """The result holds what was trained, and loads with the libraries alone."""
    MERGE = "merge"
    """Merge and verification."""


TITLES = {
    Stage.BUILD: "build the scaled-down model",
    Stage.TRAIN: "train and save",
    Stage.RESUME: "resume from a checkpoint, compare bytes",
    Stage.COMPARE: "compare with one process",
    Stage.SAVE: "load what was saved",
    Stage.MERGE: "merge and verify",
}


class StrictModel(BaseModel):
    """Base of immutable models that refuse unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StageResult(StrictModel):
    """Result of one stage."""

    stage: Stage
    seconds: float
    """Duration. The last three stages run at the same time, so the sum exceeds the duration of the rehearsal."""
    problem: str = ""
    """Description of a failure; empty if there was none."""


class RehearsalReport(StrictModel):
    """The rehearsal's part of the model report."""

    verdict: Verdict
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    """Memory of all its processes together, with shared pages counted once (PSS)."""
    parameters: int = 0
    """Number of parameters of the scaled-down model."""
    changes: tuple[str, ...] = ()
    """Differences between the job and its rehearsal, in words."""
    stages: tuple[StageResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    kept_since: str = ""
    """Time of the rehearsal in UTC if the verdict is that of an earlier, equal one (rehearsal/verdicts.py); empty: now."""


SKIPPED = RehearsalReport(verdict=Verdict.SKIPPED)


class ModelReport(BaseModel):
    """Content of `WorkspaceLayout.model_report`. Names and shapes are global, before any sharding."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    plan_sha256: str
    model_digest: str
    """SHA-256 over configuration, index, headers and file sizes of the base model; no weight is read for it."""
    model_files: dict[str, str]
    """SHA-256 of configuration and weight files, which the merge must find again; empty if nothing is merged."""
    data_hash: str
    wrap_classes: tuple[str, ...]
    """Layer classes that become FSDP units; empty under another policy than TRANSFORMER_BASED_WRAP."""
    fsdp_units: tuple[str, ...]
    """Names of the modules that become units of their own; the root is another one."""
    dtypes: dict[str, str]
    """Element types by use: load, param, reduce, save."""
    trainable: dict[str, tuple[int, ...]]
    """Name and shape of each trained parameter."""
    saved_tensors: dict[str, tuple[int, ...]]
    """Name and shape of each tensor that the trained adapter (or model) must contain."""
    train_sequences: int
    supervised_tokens: int
    """Tokens that the loss counts in one pass over the training data."""
    total_steps: int
    record_lengths: dict[int, int]
    """Histogram of training records, dropped ones included: the smallest power of two that holds the tokens -> number of
    records.
    """
    rehearsal: RehearsalReport = SKIPPED
    """Result of the job on a scaled-down model of the same architecture."""
    memory: dict[str, int]
    """Bytes that a rank will need, by purpose; empty if they could not be estimated."""
    resharding: Choice | None = None
    """Whether ranks free gathered parameters after the forward pass, and why; None if the plan says it, or one rank trains."""
    batches: tuple[Choice, ...] = ()
    """Attention, micro-batch and recomputation, and why; empty if the plan says them."""
    warnings: tuple[Finding, ...]

    @property
    def trainable_parameters(self) -> int:
        """Number of values that are trained."""
        total = 0
        for shape in self.trainable.values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total


def _changed(path: Path, what: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"{path.name} on the workspace {what}: something else has written it",
        "create the job again with an empty workspace, and keep other writers off the claim",
    )


def read_report(path: Path) -> ModelReport | None:
    """Read the report at `path`; None if there is none."""
    return ModelReport.model_validate_json(read_own(path)) if path.is_file() else None


def with_choices_of_preflight(plan: RunPlan, path: Path) -> RunPlan:
    """The plan with the choices in the report at `path`, which are the same for every attempt.

    Without a choice of preflight, ranks free gathered parameters after the forward pass, which takes the least memory. Raises
    PlanMismatchError if the report holds what preflight never writes: it is on the workspace, where others may write.
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
            raise _changed(path, f"says {wrong.field}: {str(wrong.value)[:_SHOWN]}, which preflight chooses for no such job")
        plan = plan.with_choices(report.batches)
    return plan.with_fsdp(reshard_after_forward=frees) if plan.parallelism.leaves_resharding_open else plan

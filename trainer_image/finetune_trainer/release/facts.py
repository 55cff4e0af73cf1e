"""Facts about a run, read from the workspace, with which its results are described."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_job.api.base import ClaimPath
from finetune_job.plan.launch_plan import FetchItem
from finetune_job.plan.run_plan import GLOBAL_BATCH_FIELD, RunPlan
from finetune_trainer.added_tokens import AddedTokens, read_added_tokens
from finetune_trainer.context import RunContext
from finetune_trainer.data.shards import TRAIN, VALIDATION, read_manifest
from finetune_trainer.files import read_own
from finetune_trainer.inspection.report import ModelReport
from finetune_trainer.json_lines import read_lines
from finetune_trainer.observe.goodput import AttemptStarted, GoodputRecord, parse_records, starts_and_ends
from finetune_trainer.release.adapter_check import ServingReport
from finetune_trainer.release.files import ReleaseLayout, release_layout
from finetune_trainer.release.licence import Licence, read_licence
from finetune_trainer.verify.gate import gate_rows

if TYPE_CHECKING:
    from finetune_trainer.verify.report import VerificationReport

TABLE_ROWS = 12
"""Maximum number of rows of the table of steps."""


@dataclass(frozen=True)
class SourceFile:
    """A file of records, whose digest was taken when its records were prepared."""

    name: str
    """Path below the source; empty if the source is the file itself."""
    sha256: str


@dataclass(frozen=True)
class DataSource:
    """One source of records."""

    split: str
    source: str
    """The source as the user wrote it."""
    revision: str | None
    """Commit of an `hf://` source."""
    weight: float
    files: tuple[SourceFile, ...]
    counts: Mapping[str, Any]
    """Counts by the field names of DatasetFacts; empty if preparation recorded none."""


@dataclass(frozen=True)
class RunFacts:
    """Everything that the model card and the provenance state."""

    plan: RunPlan
    plan_sha256: str
    learning_sha256: str
    layout: ReleaseLayout
    base_source: str
    """Origin of the base, as the user wrote it."""
    model_digest: str | None
    """SHA-256 over configuration, index, headers and file sizes of the base model; None if preflight left no report."""
    licence: Licence
    data_hash: str
    sources: tuple[DataSource, ...]
    splits: Mapping[str, Mapping[str, Any]]
    """Counts of each split, by the field names of SplitFacts."""
    history: TrainingHistory
    trained_step: int
    """Optimizer step whose weights were exported."""
    verification: VerificationReport | None
    """Verification of the merge; None if nothing was merged."""
    serving: ServingReport | None
    """Report of how engines serve the adapter; None without an adapter."""
    added: AddedTokens | None = None
    """Tokens that the job adds to the base; None if it adds none."""
    attempts: Sequence[tuple[AttemptStarted, GoodputRecord]] = ()
    """Start and last record of each training attempt, in order."""

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """Figures of the merge's verification with their thresholds, as table rows; empty if logits were not compared."""
        if self.verification is None or self.verification.logits is None or self.verification.gate is None:
            return []
        return gate_rows(self.verification.logits, self.verification.gate)


def run_facts(
    context: RunContext,
    trained_step: int,
    preflight: ModelReport | None,
    verification: VerificationReport | None,
    serving: ServingReport | None,
) -> RunFacts:
    """Collect the facts from these arguments and from files. Raises OSError, PreparedDataError, ModelError."""
    plan, workspace = context.plan, context.workspace
    prepared = read_manifest(workspace.prepared)
    lines = read_own(workspace.history).decode(errors="replace") if workspace.history.is_file() else ""
    records = read_own(workspace.accounts).decode(errors="replace") if workspace.accounts.is_file() else ""
    fetched = {item.target: item for item in plan.fetch.items} if plan.fetch is not None else {}
    splits = prepared["splits"]
    # Of preflight's choices, only the global batch size affects what is learnt; the others affect only how it is computed.
    plan = plan.with_choices(choice for choice in (preflight.batches if preflight else ()) if choice.field == GLOBAL_BATCH_FIELD)
    return RunFacts(
        plan=plan,
        plan_sha256=context.plan_sha256,
        learning_sha256=context.learning_sha256,
        layout=release_layout(plan),
        base_source=fetched[plan.model.location].source if plan.model.location in fetched else plan.model.name,
        model_digest=None if preflight is None else preflight.model_digest,
        licence=read_licence(context.base_model),
        data_hash=prepared["data_hash"],
        sources=_sources(plan, prepared, fetched),
        splits=splits if isinstance(splits, dict) else {},
        history=training_history(read_lines(lines)),
        trained_step=trained_step,
        verification=verification,
        serving=serving,
        added=read_added_tokens(workspace.added_tokens) if plan.model.added_tokens else None,
        attempts=starts_and_ends(parse_records(read_lines(records))),
    )


def _sources(plan: RunPlan, prepared: Mapping[str, Any], fetched: Mapping[ClaimPath, FetchItem]) -> tuple[DataSource, ...]:
    """List the sources in the plan's order, each with its counts from preparation."""
    planned = [(TRAIN, source) for source in plan.data.train]
    planned += [(VALIDATION, plan.data.validation)] if plan.data.validation is not None else []
    read = prepared.get("inputs", {}).get("sources", [])
    counts = prepared.get("datasets", [])
    data_sources = []
    for number, (split, source) in enumerate(planned):
        files = read[number]["files"] if number < len(read) else []
        # If a source is a single file, preparation keeps only the file's suffix.
        named = [SourceFile("" if len(files) == 1 and name.startswith(".") else name, sha256) for name, sha256 in files]
        data_sources.append(
            DataSource(
                split=split,
                source=source.source,
                revision=fetched[source.location].revision if source.location in fetched else None,
                weight=source.weight,
                files=tuple(named),
                counts=counts[number] if number < len(counts) else {},
            )
        )
    return tuple(data_sources)


@dataclass(frozen=True)
class Point:
    """One optimizer step, or the state before the first step."""

    step: int
    loss: float | None
    """Mean loss over the supervised tokens of the step; None before the first step."""
    eval_loss: float | None
    """Mean loss over the supervised held-out tokens; None if nothing was held out or evaluated."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """Norm of the gradients of all trainable parameters, before clipping."""
    tokens_per_second: float | None = None
    """Document tokens per second, over all ranks."""


@dataclass(frozen=True)
class TrainingHistory:
    """Content of the run's history file."""

    points: tuple[Point, ...]
    tokens: int
    supervised_tokens: int
    peak_memory_bytes: int | None = None
    """Highest peak memory of any rank: device memory, or resident memory on a CPU. None if no step measured it."""
    calculated_tokens_per_second: float | None = None
    """Rate that the planner calculated for the latest attempt's device; None if the planner does not know the device."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of the median step."""
        rates = [rate for _, rate in self.values("tokens_per_second")]
        return statistics.median(rates) if rates else None

    def values(self, name: str) -> list[tuple[int, float]]:
        """Return the step and the value of each point that has a value of this name."""
        return [(point.step, value) for point in self.points if (value := getattr(point, name)) is not None]


def training_history(lines: Sequence[Mapping[str, Any]]) -> TrainingHistory:
    """Return the history. If a step has several lines, the last one counts: a resumed run did the step again."""
    by_step = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    kept = [by_step[step] for step in sorted(by_step)]
    values = ("loss", "eval_loss", "learning_rate", "gradient_norm", "tokens_per_second")
    points = tuple(Point(line["step"], **{name: _number(line.get(name)) for name in values}) for line in kept)
    peaks = [line["peak_memory_bytes"] for line in kept if isinstance(line.get("peak_memory_bytes"), int)]
    return TrainingHistory(
        points,
        _sum(kept, "tokens"),
        _sum(kept, "supervised_tokens"),
        max(peaks, default=None),
        _number(kept[-1].get("calculated_tokens_per_second")) if kept else None,
    )


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) else math.inf
    except OverflowError:  # a very large integer
        return None
    # The trainer writes only finite numbers, so any other number comes from a changed file and is left out.
    return number if math.isfinite(number) else None


def _sum(lines: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(line[name] for line in lines if isinstance(line.get(name), int))


def table_points(points: Sequence[Point], most: int = TABLE_ROWS) -> list[Point]:
    """Choose up to `most` table points, including the first and last, from those with a held-out loss if there are several."""
    evaluated = [point for point in points if point.eval_loss is not None]
    from_these = evaluated if len(evaluated) > 1 else list(points)
    if len(from_these) <= most:
        return from_these
    return [from_these[round(number * (len(from_these) - 1) / (most - 1))] for number in range(most)]


def count_text(count: object) -> str:
    """Format a count of records, tokens or steps for people."""
    return f"{count:,}" if isinstance(count, int) else "not counted"

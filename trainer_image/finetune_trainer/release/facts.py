"""What is known of a run when its results are described, read from the workspace. Times are left out: equal runs, equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_job.api.base import ClaimPath
from finetune_job.plan.run_plan import RunPlan
from finetune_job.plan.transfers import FetchItem
from finetune_trainer.context import RunContext
from finetune_trainer.data.shards import TRAIN, VALIDATION, read_manifest
from finetune_trainer.inspection.report import ModelReport
from finetune_trainer.observe.lines import read_lines
from finetune_trainer.release.curves import Course, course
from finetune_trainer.release.licence import Licence, read_licence
from finetune_trainer.release.places import Places, places_of
from finetune_trainer.release.serving import ServingReport

if TYPE_CHECKING:
    from finetune_trainer.verify.report import VerificationReport


@dataclass(frozen=True)
class SourceFile:
    """A file of records, proven when it was prepared."""

    name: str
    """Below the source; empty where the source is the file."""
    sha256: str


@dataclass(frozen=True)
class DataSource:
    """One source of records."""

    split: str
    source: str
    """As the user wrote it."""
    revision: str | None
    """Commit, of `hf://` sources."""
    weight: float
    files: tuple[SourceFile, ...]
    counts: Mapping[str, Any]
    """As DatasetFacts names them; empty where preparation kept none."""


@dataclass(frozen=True)
class RunFacts:
    """Everything that the model card and the provenance say."""

    plan: RunPlan
    plan_sha256: str
    learning_sha256: str
    places: Places
    base_source: str
    """Where the base came from, as the user wrote it."""
    model_digest: str | None
    """SHA-256 over configuration, index, headers and file sizes of the base model; None where preflight left no report."""
    licence: Licence
    data_hash: str
    sources: tuple[DataSource, ...]
    splits: Mapping[str, Mapping[str, Any]]
    """Counts of each split, as SplitFacts names them."""
    course: Course
    trained_step: int
    """Optimizer step whose weights were exported."""
    verification: VerificationReport | None
    """None where nothing was merged."""
    serving: ServingReport | None
    """None without an adapter."""


def run_facts(
    context: RunContext,
    trained_step: int,
    preflight: ModelReport | None,
    verification: VerificationReport | None,
    serving: ServingReport | None,
) -> RunFacts:
    """Read what is not given. Raises OSError, PreparedDataError."""
    plan, workspace = context.plan, context.workspace
    prepared = read_manifest(workspace.prepared)
    history = workspace.history.read_text(errors="replace") if workspace.history.is_file() else ""
    fetched = {item.target: item for item in plan.fetch.items} if plan.fetch is not None else {}
    splits = prepared["splits"]
    return RunFacts(
        plan=plan,
        plan_sha256=context.plan_sha256,
        learning_sha256=context.learning_sha256,
        places=places_of(plan),
        base_source=fetched[plan.model.location].source if plan.model.location in fetched else plan.model.name,
        model_digest=None if preflight is None else preflight.model_digest,
        licence=read_licence(context.base_model),
        data_hash=prepared["data_hash"],
        sources=_sources(plan, prepared, fetched),
        splits=splits if isinstance(splits, dict) else {},
        course=course(read_lines(history)),
        trained_step=trained_step,
        verification=verification,
        serving=serving,
    )


def _sources(plan: RunPlan, prepared: Mapping[str, Any], fetched: Mapping[ClaimPath, FetchItem]) -> tuple[DataSource, ...]:
    """The plan's sources, with what preparation found in them, in its order."""
    planned = [(TRAIN, source) for source in plan.data.train]
    planned += [(VALIDATION, plan.data.validation)] if plan.data.validation is not None else []
    read = prepared.get("inputs", {}).get("sources", [])
    counts = prepared.get("datasets", [])
    found = []
    for number, (split, source) in enumerate(planned):
        files = read[number]["files"] if number < len(read) else []
        # Of a single file preparation keeps the ending alone.
        named = [SourceFile("" if len(files) == 1 and name.startswith(".") else name, sha256) for name, sha256 in files]
        found.append(
            DataSource(
                split=split,
                source=source.source,
                revision=fetched[source.location].revision if source.location in fetched else None,
                weight=source.weight,
                files=tuple(named),
                counts=counts[number] if number < len(counts) else {},
            )
        )
    return tuple(found)

"""The jobs that were run on this machine, as a table and as data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune_cli.local.known_runs import KnownRun
from finetune_cli.render.columns import table
from finetune_cli.render.run import WORK, progress_text

_HEADER = ("JOB", "STATE", "PROCESS", "SINCE", "STEP")


def runs_text(runs: Sequence[KnownRun], claims: Path) -> str:
    """Return a table with one line for each run."""
    if not runs:
        return f"no job was run below {claims}\n"
    return table(_HEADER, [_row(run) for run in runs])


def _row(run: KnownRun) -> tuple[str, ...]:
    holder, progress = run.holder, run.progress()
    process = "" if holder is None else str(holder.pid) if holder.pid else "saving"
    since = "" if holder is None or not holder.pid else f"{holder.since:%Y-%m-%d %H:%M:%S}"
    step = "" if progress is None else f"{progress.step}/{progress.total_steps}  {progress_text(progress)}".rstrip()
    return run.title, _state(run), process, since, step


def _state(run: KnownRun) -> str:
    stage = run.record.stage
    if run.holder is not None:
        return WORK[stage] if stage else "starting"
    return "ended" if stage is None else f"stopped in {stage}"


def runs_document(runs: Sequence[KnownRun]) -> dict[str, Any]:
    """Return the runs as data."""
    return {"runs": [_entry(run) for run in runs]}


def _entry(run: KnownRun) -> dict[str, Any]:
    progress = run.progress()
    return {
        "namespace": run.plan.job.namespace,
        "name": run.plan.job.name,
        "state": _state(run),
        "stage": run.record.stage,
        "finished": list(run.record.finished),
        "process": run.holder.pid if run.holder else None,
        "since": run.holder.since.isoformat() if run.holder else None,
        "progress": progress.model_dump(exclude_none=True) if progress else None,
        "directory": str(run.place.root),
    }

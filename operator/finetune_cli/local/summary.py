"""Summary of a run, from its record, its history and its reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_cli.local.run_directory import RunRecord
from finetune_job.layout import OutputLayout, WorkspaceLayout
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan


@dataclass(frozen=True)
class Losses:
    """Mean loss per supervised token at the start and at the end of training."""

    first: float
    last: float
    held_out: bool
    """Whether the losses are those of held-out records; if not, they are those of training batches."""


@dataclass(frozen=True)
class Summary:
    """Everything that is reported at the end of a run."""

    losses: Losses | None
    step: int
    adapter: Path | None
    merged: Path | None
    verification: Path | None
    """The report of the run, or of the verification if the run got no further."""
    address: str | None = None
    """Address of exactly this version of the published results."""
    adapter_address: str | None = None
    """Address of the published adapter, if it has its own repository."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Content of verification.json."""
    has_failed_verification: bool = False
    """Whether the run ended because the verification failed."""
    workspace: Path = Path()
    restarts: int = 0
    seconds: float = 0.0


def summarise(plan: RunPlan, record: RunRecord, claims: Path) -> Summary:
    """Summarise a run from its record and from the files that exist now."""
    workspace = WorkspaceLayout((claims / plan.workspace.claim).resolve() / plan.workspace.path)
    output = OutputLayout((claims / plan.output.claim).resolve() / plan.output.path)
    history = read_history(workspace.history)
    try:
        content = json.loads(output.verification.read_bytes())
    except (OSError, ValueError, RecursionError):
        content = None
    figures = content if isinstance(content, dict) else {}
    return Summary(
        losses=losses(record.facts.get(Role.TRAIN, {}), history),
        step=max((int(line["step"]) for line in history if isinstance(line.get("step"), int)), default=0),
        adapter=_existing(output.adapter),
        merged=_existing(output.merged),
        verification=_existing(output.report) or _existing(output.verification_page) or _existing(output.verification),
        address=record.facts.get(Role.PUBLISH, {}).get("address"),
        adapter_address=record.facts.get(Role.PUBLISH, {}).get("adapter_address"),
        figures=figures,
        has_failed_verification=record.stage is Role.MERGE and figures.get("passed") is False,
        workspace=workspace.root,
        restarts=sum(role.counted + role.uncounted for role in record.restarts.values()),
        seconds=sum(record.seconds.values()),
    )


def losses(facts: Mapping[str, str], history: list[dict[str, Any]]) -> Losses | None:
    """Return the held-out losses that the trainer reported or recorded, else the first and the last loss of a step."""
    if "initial_eval_loss" in facts and "eval_loss" in facts:
        return Losses(float(facts["initial_eval_loss"]), float(facts["eval_loss"]), held_out=True)
    evaluations = _numbers(history, "eval_loss")
    if len(evaluations) > 1:
        return Losses(evaluations[0], evaluations[-1], held_out=True)
    losses = _numbers(history, "loss")
    return Losses(losses[0], losses[-1], held_out=False) if losses else None


def _numbers(history: list[dict[str, Any]], name: str) -> list[float]:
    """Return the numbers that lines of the history hold under a name; other lines are skipped."""
    values = (line.get(name) for line in history)
    # A whole number in JSON may be too large for a float; such numbers are left out.
    return [float(number) for number in values if isinstance(number, int | float) and abs(number) < sys.float_info.max]


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the history or of the accounts. The last line may be incomplete."""
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return lines
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            lines.append(content)
    return lines

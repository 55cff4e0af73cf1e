"""Summary of a run, from its record, its history and its reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_cli.local.run_directory import RunRecord
from finetune_job.api.base import ClaimPath
from finetune_job.layout import OutputLayout, WorkspaceLayout
from finetune_job.names import Role
from finetune_job.plan.run_plan import RunPlan


@dataclass(frozen=True)
class Losses:
    """Mean loss per supervised token at both ends of the training."""

    first: float
    last: float
    held_out: bool
    """Whether the losses are of the held-out records; otherwise of the training batches."""


@dataclass(frozen=True)
class Summary:
    """Everything that is told in the end."""

    losses: Losses | None
    step: int
    adapter: Path | None
    merged: Path | None
    verification: Path | None
    """The report of the run, or of the verification if the run got no further."""
    address: str | None = None
    """Address of the published results, which names this exact content."""
    adapter_address: str | None = None
    """Address of the published adapter, if it has its own repository."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Content of verification.json."""
    has_failed_verification: bool = False
    """The run ended because of it."""
    workspace: Path = Path()
    restarts: int = 0
    seconds: float = 0.0


def summarise(plan: RunPlan, record: RunRecord, claims: Path) -> Summary:
    """Summarise what exists now."""
    workspace = WorkspaceLayout(_place(claims, plan.workspace))
    output = OutputLayout(_place(claims, plan.output))
    history, figures = read_history(workspace.history), _figures(output.verification)
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
        restarts=sum(one.counted + one.uncounted for one in record.restarts.values()),
        seconds=sum(record.seconds.values()),
    )


def losses(facts: Mapping[str, str], history: list[dict[str, Any]]) -> Losses | None:
    """The held-out losses that the trainer reported or wrote down, else the first and the last loss of a step."""
    if "initial_eval_loss" in facts and "eval_loss" in facts:
        return Losses(float(facts["initial_eval_loss"]), float(facts["eval_loss"]), held_out=True)
    evaluations = _numbers(history, "eval_loss")
    if len(evaluations) > 1:
        return Losses(evaluations[0], evaluations[-1], held_out=True)
    losses = _numbers(history, "loss")
    return Losses(losses[0], losses[-1], held_out=False) if losses else None


def _numbers(history: list[dict[str, Any]], name: str) -> list[float]:
    """Numbers of the lines that have one."""
    values = (line.get(name) for line in history)
    # Whole numbers in JSON have no limit.
    return [float(one) for one in values if isinstance(one, int | float) and abs(one) < sys.float_info.max]


def _place(claims: Path, location: ClaimPath) -> Path:
    return (claims / location.claim).resolve() / location.path


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def read_history(path: Path) -> list[dict[str, Any]]:
    """The lines of the history or of the accounts; the last one may have been cut off."""
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


def _figures(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}

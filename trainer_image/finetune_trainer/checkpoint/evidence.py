"""Finds evidence of a run's progress on the workspace, in case no checkpoint can be read.

Starting at step 0 would discard what was trained, perhaps only because a directory is unreachable. So other traces of checkpoints
are read first: three files, and the rank reports of earlier attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_job.failures import FailureClass, Outcome
from finetune_job.layout import WorkspaceLayout, checkpoint_step
from finetune_job.names import Role
from finetune_trainer.checkpoint.manifest import LATEST
from finetune_trainer.files import open_regular
from finetune_trainer.json_lines import last_lines
from finetune_trainer.ranks.reports import read_rank_reports

CHECKPOINT_STEP = "checkpoint_step"
"""Key in a history line for the step of the newest checkpoint that was complete when the line was written."""
_STEP_DIGITS = 20
_NAME_BYTES = 100
"""Number of bytes that are read to get a checkpoint's name. Every name is shorter."""


@dataclass(frozen=True)
class Evidence:
    """Evidence that a checkpoint was once complete."""

    step: int
    path: Path
    """The file with the evidence, or the directory of an attempt's reports."""


def recorded_progress(workspace: WorkspaceLayout) -> Evidence | None:
    """Return the evidence with the latest step, or None. Raises OSError if a file cannot be read."""
    # An attempt that started after step 0 had resumed from a checkpoint, so its record is evidence of one.
    starts = [line for line in last_lines(workspace.accounts) if line.get("kind") == "started"]
    latest = workspace.checkpoints / LATEST
    records = [
        Evidence(_latest(latest), latest),
        Evidence(_last_step(last_lines(workspace.history), CHECKPOINT_STEP), workspace.history),
        Evidence(_last_step(starts, "step"), workspace.accounts),
        *_reported(workspace),
    ]
    return max((record for record in records if record.step > 0), key=lambda record: record.step, default=None)


def _reported(workspace: WorkspaceLayout) -> Iterator[Evidence]:
    """Yield evidence from ranks that were stopped or finished, and so saved their last step, which the history may lack."""
    for attempt in workspace.reports(Role.TRAIN, 0).parent.glob(f"{Role.TRAIN}-*"):
        for report in read_rank_reports(attempt):
            if report.failure is FailureClass.PREEMPTED:
                yield Evidence(report.step or 0, attempt)
            elif report.outcome is Outcome.SUCCEEDED:
                step = report.facts.get("step", "")
                yield Evidence(int(step) if step.isdecimal() and len(step) < _STEP_DIGITS else 0, attempt)


def _latest(path: Path) -> int:
    try:
        with open_regular(path) as file:
            return checkpoint_step(file.read(_NAME_BYTES).decode(errors="replace").strip()) or 0
    except FileNotFoundError:
        return 0


def _last_step(lines: Iterable[dict[str, Any]], key: str) -> int:
    steps = (line.get(key) for line in lines)
    return max((step for step in steps if type(step) is int), default=0)

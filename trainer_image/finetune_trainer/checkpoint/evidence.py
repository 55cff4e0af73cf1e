"""What the workspace still knows of a run's progress if no checkpoint can be read.

A start at step 0 throws away what was trained, and perhaps only because a directory is out of reach. So what else tells of
checkpoints is asked before it: three files, and what ranks of earlier attempts reported when they ended.
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
"""In a line of the history: step of the newest checkpoint that was complete then."""
_STEP_DIGITS = 20
_NAME_BYTES = 100
"""More than a checkpoint's name has."""


@dataclass(frozen=True)
class Evidence:
    """A checkpoint was complete once."""

    step: int
    path: Path
    """Of the file that says so, or the directory of an attempt's reports."""


def recorded_progress(workspace: WorkspaceLayout) -> Evidence | None:
    """The latest step of which a file says that its checkpoint was complete. Raises OSError if one cannot be read."""
    # An attempt that began after step 0 has resumed.
    starts = [line for line in last_lines(workspace.accounts) if line.get("kind") == "started"]
    latest = workspace.checkpoints / LATEST
    found = [
        Evidence(_latest(latest), latest),
        Evidence(_last_step(last_lines(workspace.history), CHECKPOINT_STEP), workspace.history),
        Evidence(_last_step(starts, "step"), workspace.accounts),
        *_reported(workspace),
    ]
    return max((each for each in found if each.step > 0), key=lambda each: each.step, default=None)


def _reported(workspace: WorkspaceLayout) -> Iterator[Evidence]:
    """Ranks that were stopped or came to the end have saved their last step, which no line of the history can say any more."""
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

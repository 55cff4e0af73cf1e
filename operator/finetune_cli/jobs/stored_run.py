"""Reads the history and checkpoints of a job from what a pod printed of its workspace. The input may be anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune_cli.jobs import documents
from finetune_job.layout import WorkspaceLayout, checkpoint_step

_LAYOUT = WorkspaceLayout(Path())
HISTORY, CHECKPOINTS = str(_LAYOUT.history), str(_LAYOUT.checkpoints)
_MOST_BYTES = 1 << 63


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on the workspace."""

    step: int
    is_complete: bool
    """Whether its manifest, which is written last, exists."""
    bytes: int
    saved: datetime | None
    loss: float | None
    """Loss of the checkpoint's step."""
    eval_loss: float | None
    """Loss of the latest evaluation up to the checkpoint's step."""
    is_best: bool = False
    """Whether this checkpoint's held-out loss is the lowest of all."""


@dataclass(frozen=True)
class StoredRun:
    """History and checkpoints of a job."""

    losses: tuple[float, ...]
    """Losses of the steps, in order."""
    checkpoints: tuple[StoredCheckpoint, ...]
    is_cut: bool
    """Whether only the end of the history could be read."""


def stored_run(printed: Iterable[Mapping[str, Any]]) -> StoredRun:
    """Build the run from the lines that the pod printed."""
    points: dict[int, dict[str, Any]] = {}
    folders: dict[int, Mapping[str, Any]] = {}
    is_cut = False
    for line in printed:
        is_cut = is_cut or line.get("cut") is True
        parent, _, name = str(line.get("file", "")).rpartition("/")
        step = checkpoint_step(name) if parent == CHECKPOINTS else None
        if step is not None and line.get("directory") is True:
            folders[step] = line
        elif line.get("file") == HISTORY and isinstance(line.get("line"), str):
            try:
                point = json.loads(line["line"])
            except (ValueError, RecursionError):
                continue
            if isinstance(point, dict) and isinstance(point.get("step"), int):
                points[point["step"]] = point
    losses = [loss for step in sorted(points) if (loss := _number(points[step].get("loss"))) is not None]
    evaluations = {step: loss for step in sorted(points) if (loss := _number(points[step].get("eval_loss"))) is not None}
    lowest = min(evaluations.values(), default=None)
    checkpoints = []
    for step, folder in sorted(folders.items()):
        size = documents.number(folder, "bytes") or 0
        held_out = next((loss for evaluated, loss in reversed(evaluations.items()) if evaluated <= step), None)
        checkpoints.append(
            StoredCheckpoint(
                step=step,
                is_complete=folder.get("complete") is True,
                bytes=size if 0 <= size < _MOST_BYTES else 0,
                saved=_time(folder.get("time")),
                loss=_number(points.get(step, {}).get("loss")),
                eval_loss=held_out,
                is_best=held_out is not None and held_out == lowest,
            )
        )
    return StoredRun(tuple(losses), tuple(checkpoints), is_cut)


def _number(value: object) -> float | None:
    return documents.decimal(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(written: object) -> datetime | None:
    seconds = _number(written)
    try:
        return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC)
    except (OverflowError, OSError, ValueError):
        return None

"""What a job's workspace holds: the losses of its steps and its checkpoints, read by a pod that lives for seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_cli.cluster.objects import Cluster
from finetune_cli.cluster.reader_pod import read_workspace
from finetune_cli.jobs import documents
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.render.columns import figure, table
from finetune_job.layout import WorkspaceLayout, checkpoint_step

_LAYOUT = WorkspaceLayout(Path())
HISTORY, CHECKPOINTS = str(_LAYOUT.history), str(_LAYOUT.checkpoints)
_MOST_BYTES = 1 << 63


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on the workspace."""

    step: int
    is_complete: bool
    bytes: int
    loss: float | None
    """Of its step."""
    eval_loss: float | None
    """Of the latest evaluation up to its step."""
    is_best: bool = False
    """Whether its held-out loss is the lowest of all."""


@dataclass(frozen=True)
class StoredRun:
    """History and checkpoints of a job."""

    losses: tuple[float, ...]
    """Of the steps, in order."""
    checkpoints: tuple[StoredCheckpoint, ...]
    is_cut: bool
    """Whether only the end of the history could be read."""


def read_run(cluster: Cluster, job: SeenJob) -> StoredRun:
    """Raises ClusterError."""
    with closing(read_workspace(cluster, job, [HISTORY, CHECKPOINTS])) as found:
        return stored_run(list(found))


def stored_run(printed: list[Mapping[str, Any]]) -> StoredRun:
    """What the pod printed, read whatever it is."""
    points: dict[int, dict[str, Any]] = {}
    sizes: dict[int, tuple[bool, int]] = {}
    is_cut = False
    for each in printed:
        is_cut = is_cut or each.get("cut") is True
        folder, _, name = str(each.get("file", "")).rpartition("/")
        step = checkpoint_step(name) if folder == CHECKPOINTS else None
        if step is not None and each.get("directory") is True:
            size = documents.number(each, "bytes") or 0
            sizes[step] = (each.get("complete") is True, size if 0 <= size < _MOST_BYTES else 0)
        elif each.get("file") == HISTORY and isinstance(each.get("line"), str):
            point = _point(each["line"])
            if point is not None:
                points[point["step"]] = point
    losses = [loss for step in sorted(points) if (loss := _number(points[step].get("loss"))) is not None]
    return StoredRun(tuple(losses), tuple(_with_losses(points, sizes)), is_cut)


def _point(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return found if isinstance(step, int) else None


def _number(value: object) -> float | None:
    return documents.decimal(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _with_losses(points: Mapping[int, Mapping[str, Any]], sizes: Mapping[int, tuple[bool, int]]) -> list[StoredCheckpoint]:
    evaluations = {step: loss for step in sorted(points) if (loss := _number(points[step].get("eval_loss"))) is not None}
    best = min(evaluations.values(), default=None)
    found = []
    for step in sorted(sizes):
        complete, size = sizes[step]
        held_out = next((loss for at, loss in reversed(evaluations.items()) if at <= step), None)
        is_best = held_out is not None and held_out == best
        loss = _number(points.get(step, {}).get("loss"))
        found.append(StoredCheckpoint(step, complete, size, loss, held_out, is_best))
    return found


def checkpoints_text(run: StoredRun) -> str:
    """One line for each."""
    if not run.checkpoints:
        return "the workspace holds no checkpoint\n"
    rows = [
        (
            str(each.step),
            "yes" if each.is_complete else "no",
            f"{each.bytes / 2**20:.1f} MiB",
            figure(each.loss),
            figure(each.eval_loss) + (" (lowest)" if each.is_best else ""),
        )
        for each in run.checkpoints
    ]
    return table(("STEP", "COMPLETE", "SIZE", "LOSS", "HELD OUT"), rows)


def checkpoints_document(job: SeenJob, run: StoredRun) -> dict[str, Any]:
    """The same as data."""
    return {
        "namespace": job.namespace,
        "name": job.name,
        "checkpoints": [
            {
                "step": each.step,
                "complete": each.is_complete,
                "bytes": each.bytes,
                "loss": each.loss,
                "evalLoss": each.eval_loss,
                "best": each.is_best,
            }
            for each in run.checkpoints
        ],
    }

"""Removes checkpoints that are older than the newest `keep` valid ones, except the best. Damaged ones do not count as kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from finetune_job.layout import checkpoint_step
from finetune_trainer.checkpoint.manifest import Manifest, Origin, read_manifest
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import TEMPORARY_MARK, remove_tree

log = logging.getLogger(__name__)
FEWEST_KEPT = 2
"""Minimum number of checkpoints to keep, since the next crash may damage the newest."""


def checkpoint_directories(root: Path) -> list[Path]:
    """List the directories whose names are those of checkpoints, latest step first."""
    if not root.is_dir():
        return []
    steps = [(step, path) for path in root.iterdir() if (step := checkpoint_step(path.name)) is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def outdated(manifests: Mapping[int, Manifest | None], keep: int) -> list[int]:
    """Return the steps of the checkpoints to remove. manifests: step -> manifest, or None if the checkpoint is damaged.

    All checkpoints older than the newest `keep` valid ones are removed; if fewer are valid, none is removed. A checkpoint that a
    kept manifest names as the best also stays, because a resumed run may have to export it.
    """
    newest_first = (manifests[step] for step in sorted(manifests, reverse=True))
    valid = [manifest for manifest in newest_first if manifest is not None][: max(keep, FEWEST_KEPT)]
    if len(valid) < max(keep, FEWEST_KEPT):
        return []
    best = {manifest.best_step for manifest in valid}
    return sorted(step for step in manifests if step < valid[-1].step and step not in best)


def prune(root: Path, keep: int, origin: Origin) -> None:
    """Remove outdated checkpoints. Each directory is renamed first, so that a partly removed one never counts as a checkpoint."""
    directories = {step: path for path in checkpoint_directories(root) if (step := checkpoint_step(path.name)) is not None}
    for step in outdated({step: _manifest(path, origin) for step, path in directories.items()}, keep):
        doomed = directories[step].with_name(f"{directories[step].name}{TEMPORARY_MARK}removed")
        remove_tree(doomed)
        directories[step].rename(doomed)
        remove_tree(doomed)


def remove_leftovers(root: Path) -> None:
    """Remove incomplete directories that killed attempts left. This is safe, since only one attempt of a job runs at a time."""
    if root.is_dir():
        for path in root.glob(f"*{TEMPORARY_MARK}*"):
            log.info("removing %s, which was left incomplete", path.name)
            remove_tree(path)


def _manifest(directory: Path, origin: Origin) -> Manifest | None:
    try:
        return read_manifest(directory, origin)
    except CheckpointError:
        return None

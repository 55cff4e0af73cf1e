"""Which checkpoints go: those older than the newest `keep` valid ones. Damaged ones never count as kept."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from finetune_trainer.checkpoint.manifest import read
from finetune_trainer.checkpoint.names import step_of
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import TEMPORARY_MARK

log = logging.getLogger(__name__)
FEWEST_KEPT = 2
"""The newest may be the one that the next crash finds damaged."""


def checkpoint_directories(root: Path) -> list[Path]:
    """Directories that bear a checkpoint's name, newest step first."""
    if not root.is_dir():
        return []
    named = [(step, path) for path in root.iterdir() if (step := step_of(path.name)) is not None]
    return [path for _, path in sorted(named, reverse=True)]


def outdated(validity: Mapping[int, bool], keep: int) -> list[int]:
    """PURE. Steps to remove: all below the oldest of the newest `keep` valid ones; none while there are fewer."""
    valid = sorted((step for step, is_valid in validity.items() if is_valid), reverse=True)[: max(keep, FEWEST_KEPT)]
    if len(valid) < max(keep, FEWEST_KEPT):
        return []
    return sorted(step for step in validity if step < valid[-1])


def prune(root: Path, keep: int, plan_sha256: str, data_hash: str) -> None:
    """Remove outdated checkpoints. A directory is first renamed to a temporary name, so that half of it is never taken for one."""
    directories = {step: path for path in checkpoint_directories(root) if (step := step_of(path.name)) is not None}
    for step in outdated({step: _looks_valid(path, plan_sha256, data_hash) for step, path in directories.items()}, keep):
        doomed = directories[step].with_name(f"{directories[step].name}{TEMPORARY_MARK}removed")
        shutil.rmtree(doomed, ignore_errors=True)
        directories[step].rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(root: Path) -> None:
    """Remove what killed runs left half-written. Only one attempt of a job runs at a time."""
    if root.is_dir():
        for path in root.glob(f"*{TEMPORARY_MARK}*"):
            log.info("removing %s, which was left incomplete", path.name)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _looks_valid(directory: Path, plan_sha256: str, data_hash: str) -> bool:
    try:
        read(directory, plan_sha256, data_hash)
    except CheckpointError:
        return False
    return True

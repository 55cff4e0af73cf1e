"""Write a checkpoint: temporary directory, every file durable, manifest, rename, `latest`, and only then old ones go.

The steps that all ranks do together are functions here; what one rank writes alone may happen beside the training loop.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune_trainer.checkpoint.manifest import FileEntry, Manifest, Origin, RunState
from finetune_trainer.checkpoint.names import LATEST, MANIFEST, directory_name, rank_file
from finetune_trainer.checkpoint.optimizer_state import agreed
from finetune_trainer.checkpoint.rank_file import Snapshot, snapshot, write_rank_file
from finetune_trainer.checkpoint.retention import prune
from finetune_trainer.checkpoint.state import Piece
from finetune_trainer.errors import SaveError
from finetune_trainer.files import TEMPORARY_MARK, publish_directory, write_durably
from finetune_trainer.ranks.gang import Gang

log = logging.getLogger(__name__)
SAVE_HINT = "make room on the claim that holds the workspace, or enlarge it; the older checkpoints are unharmed"


@dataclass(frozen=True)
class Writing:
    """One rank's file on its way; `begin` all of them, then `commit`."""

    temporary: Path
    unfinished: Manifest
    """Without its files."""
    taken: Snapshot
    thread: threading.Thread
    outcome: list[FileEntry | BaseException]
    """One element when the thread has ended."""

    @property
    def is_done(self) -> bool:
        """Whether this rank's file is written, or never will be."""
        return not self.thread.is_alive()


def begin(
    root: Path,
    *,
    step: int,
    found: list[Piece],
    optimizer: torch.optim.Optimizer,
    gang: Gang,
    origin: Origin,
    state: RunState,
    best_step: int | None,
    reused: Snapshot | None = None,
) -> Writing:
    """Copy the state after optimizer step `step` and begin to write it; called by all ranks together.

    `reused`: an earlier snapshot, whose memory is taken. Raises SaveError on all ranks alike.
    """
    temporary = root / gang.from_first(f"{directory_name(step)}{TEMPORARY_MARK}{uuid.uuid4().hex}")
    _by_first(gang, lambda: temporary.mkdir(parents=True), temporary)
    unfinished = Manifest(
        step=step,
        optimizer=agreed(optimizer, gang),
        origin=origin,
        world_size=gang.world_size,
        best_step=best_step,
        state=state,
        files=[],
    )
    taken = snapshot(found, optimizer, reused.tensors if reused else {})
    outcome: list[FileEntry | BaseException] = []
    thread = threading.Thread(
        target=_write, args=(temporary / rank_file(gang.rank), taken, outcome), name="checkpoint", daemon=True
    )
    thread.start()
    return Writing(temporary, unfinished, taken, thread, outcome)


def commit(root: Path, writing: Writing, gang: Gang, keep: int) -> tuple[Path, Manifest]:
    """Wait for all files and give the checkpoint its name; called by all ranks together. Its directory and manifest.

    Killed at any moment, it leaves either no checkpoint of this step or a complete one. Raises SaveError on all ranks alike.
    """
    writing.thread.join()
    (outcome,) = writing.outcome
    if isinstance(outcome, BaseException) and not isinstance(outcome, OSError):
        raise outcome
    error = f"rank {gang.rank}: {outcome}" if isinstance(outcome, OSError) else ""
    entry = outcome.model_dump() if isinstance(outcome, FileEntry) else None
    told = gang.gather((entry, error))
    if errors := [text for _, text in told if text]:
        _discard(writing.temporary, gang)
        raise SaveError(f"checkpoint of step {writing.unfinished.step}: {'; '.join(errors)}", SAVE_HINT)
    files = [FileEntry.model_validate(value) for value, _ in told]
    manifest = writing.unfinished.model_copy(update={"files": files})
    final = root / directory_name(manifest.step)
    _by_first(gang, lambda: _publish(writing.temporary, final, manifest), writing.temporary)
    if gang.is_first:
        log.info("checkpoint of step %d is complete", manifest.step)
        try:
            write_durably(root / LATEST, f"{final.name}\n".encode())
            prune(root, keep, manifest.origin)
        except OSError:
            # The checkpoint itself is complete; the next one prunes again.
            log.exception("old checkpoints could not be removed")
    gang.barrier()
    return final, manifest


def _write(path: Path, taken: Snapshot, outcome: list[FileEntry | BaseException]) -> None:
    try:
        outcome.append(write_rank_file(path, taken))
    except BaseException as error:  # noqa: BLE001 - raised in the main thread, which knows what it means
        outcome.append(error)


def _publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    write_durably(temporary / MANIFEST, manifest.encode())
    if final.exists():
        # Only a checkpoint that was refused while loading can stand here: a valid one would have been resumed from.
        shutil.rmtree(final)
    publish_directory(temporary, final)


def _by_first(gang: Gang, action: Callable[[], None], temporary: Path) -> None:
    """Let rank 0 do something on the file system and all ranks know whether it failed."""
    error = ""
    if gang.is_first:
        try:
            action()
        except OSError as failed:
            error = f"rank 0: {failed}"
    error = gang.from_first(error)
    if error:
        _discard(temporary, gang)
        raise SaveError(f"{temporary.name}: {error}", SAVE_HINT)


def _discard(temporary: Path, gang: Gang) -> None:
    if gang.is_first:
        shutil.rmtree(temporary, ignore_errors=True)
    gang.barrier()

"""Writes a checkpoint: temporary directory, one file per rank, manifest, rename, `latest`. Then removes old checkpoints.

On each rank, a thread writes the state durably: from a copy in host memory if training continues meanwhile, otherwise directly,
a few megabytes at a time. The safetensors library is not used, because its save function hides error numbers, holds the GIL, and
would need a second pass for the digest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import struct
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune_job.layout import checkpoint_name
from finetune_trainer.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    Origin,
    RangeEntry,
    RunState,
    rank_file,
    tensor_key,
)
from finetune_trainer.checkpoint.retention import prune
from finetune_trainer.checkpoint.state import PARAMETER, ParameterRange, agreed_optimizer_entry, state_form
from finetune_trainer.errors import NO_SPACE, REFUSED_WRITES, DiskFullSaveError, SaveError
from finetune_trainer.files import TEMPORARY_MARK, publish_directory, remove_tree, write_durably
from finetune_trainer.ranks.gang import EntryName, Gang
from finetune_trainer.weights.rounding import TORCH_DTYPES, dtype_name

log = logging.getLogger(__name__)
_CLAIM = "the claim that holds the workspace"
_UNHARMED = "the older checkpoints are unharmed"
_NAMES_OF_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_CHUNK_BYTES = 16 << 20
"""Number of bytes that are hashed and then written at a time. They are still in the processor's cache when they are written."""
_ALIGNMENT = 8
_Failure = tuple[str, int | None]
"""Message and error number of a rank's error, in the form that ranks send to each other."""


@dataclass(frozen=True)
class Snapshot:
    """This rank's state at a step boundary: a copy in host memory or, if training waits for the save, the trained tensors."""

    tensors: Mapping[str, torch.Tensor]
    pieces: tuple[RangeEntry, ...]


@dataclass(frozen=True)
class PendingSave:
    """A save that `begin_save` has started and `commit_save` will complete; meanwhile, a thread writes this rank's file."""

    temporary: Path
    unfinished: Manifest
    """The manifest, whose list of files is still empty."""
    snapshot: Snapshot
    thread: threading.Thread
    outcome: list[FileEntry | BaseException]
    """The thread's result or error; empty until the thread ends."""

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended, even if it could not write the file."""
        return not self.thread.is_alive()


def begin_save(
    root: Path,
    *,
    step: int,
    ranges: list[ParameterRange],
    optimizer: torch.optim.Optimizer,
    gang: Gang,
    origin: Origin,
    state: RunState,
    best_step: int | None,
    reused: Snapshot | None = None,
    is_copied: bool = True,
) -> PendingSave:
    """Start writing the state after optimizer step `step`. All ranks call this together.

    reused: an earlier snapshot, whose memory is reused. is_copied: whether to write a copy, so that training may continue;
    otherwise `commit_save` must follow at once. Raises SaveError on all ranks.
    """
    temporary = root / gang.from_first(f"{checkpoint_name(step)}{TEMPORARY_MARK}{uuid.uuid4().hex}", EntryName)
    _by_first(gang, lambda: temporary.mkdir(parents=True), temporary)
    unfinished = Manifest(
        step=step,
        optimizer=agreed_optimizer_entry(optimizer, gang),
        origin=origin,
        world_size=gang.world_size,
        best_step=best_step,
        state=state,
        files=[],
    )
    snapshot = take_snapshot(ranges, optimizer, reused.tensors if reused else {}, is_copied=is_copied)
    outcome: list[FileEntry | BaseException] = []
    thread = threading.Thread(
        target=_write, args=(temporary / rank_file(gang.rank), snapshot, outcome), name="checkpoint", daemon=True
    )
    thread.start()
    return PendingSave(temporary, unfinished, snapshot, thread, outcome)


def commit_save(root: Path, pending: PendingSave, gang: Gang, keep: int) -> tuple[Path, Manifest]:
    """Wait for all files, and rename the checkpoint into place. All ranks call this together. Returns directory and manifest.

    A kill at any moment leaves either no checkpoint of this step or a complete one. Raises SaveError on all ranks.
    """
    pending.thread.join()
    (outcome,) = pending.outcome
    if isinstance(outcome, BaseException) and not isinstance(outcome, OSError):
        raise outcome
    error = (f"rank {gang.rank}: {outcome}", outcome.errno) if isinstance(outcome, OSError) else None
    entry = outcome if isinstance(outcome, FileEntry) else None
    outcomes = gang.gather((entry, error), tuple[FileEntry | None, _Failure | None])
    if errors := [failure for _, failure in outcomes if failure is not None]:
        _discard(pending.temporary, gang)
        raise _save_error(f"checkpoint of step {pending.unfinished.step}", errors)
    files = [value for value, _ in outcomes if value is not None]
    manifest = pending.unfinished.model_copy(update={"files": files})
    final = root / checkpoint_name(manifest.step)
    _by_first(gang, lambda: _publish(pending.temporary, final, manifest), pending.temporary)
    if gang.is_first:
        log.info("checkpoint of step %d is complete", manifest.step)
        try:
            write_durably(root / LATEST, f"{final.name}\n".encode())
            prune(root, keep, manifest.origin)
        except OSError:
            # This checkpoint is complete; the next save tries again to remove old ones.
            log.exception("old checkpoints could not be removed")
    gang.barrier()
    return final, manifest


def _write(path: Path, snapshot: Snapshot, outcome: list[FileEntry | BaseException]) -> None:
    try:
        outcome.append(write_rank_file(path, snapshot))
    except BaseException as error:  # noqa: BLE001 - `commit_save` raises it in the main thread
        outcome.append(error)


def _publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    write_durably(temporary / MANIFEST, manifest.encode())
    # If a checkpoint with this name exists, it was refused while loading: the run would have resumed from a valid one.
    remove_tree(final)
    publish_directory(temporary, final)


def _by_first(gang: Gang, action: Callable[[], None], temporary: Path) -> None:
    """Run `action` on rank 0, and raise SaveError on all ranks if it failed."""
    error: _Failure | None = None
    if gang.is_first:
        try:
            action()
        except OSError as failed:
            error = (f"rank 0: {failed}", failed.errno)
    error = gang.from_first(error, _Failure | None)
    if error is not None:
        _discard(temporary, gang)
        raise _save_error(temporary.name, [error])


def _save_error(what: str, errors: Sequence[_Failure]) -> SaveError:
    message = f"{what}: {'; '.join(text for text, _ in errors)}"
    if any(number in NO_SPACE for _, number in errors):
        return DiskFullSaveError(message, f"make room on {_CLAIM}, or enlarge it; {_UNHARMED}")
    if any(number in REFUSED_WRITES for _, number in errors):
        return SaveError(message, f"look at how {_CLAIM} is mounted, and at owner and mode of its files; {_UNHARMED}")
    return SaveError(message, f"look at the storage of {_CLAIM}; {_UNHARMED}")


def _discard(temporary: Path, gang: Gang) -> None:
    if gang.is_first:
        shutil.rmtree(temporary, ignore_errors=True)
    gang.barrier()


def take_snapshot(
    ranges: list[ParameterRange], optimizer: torch.optim.Optimizer, reused: Mapping[str, torch.Tensor], *, is_copied: bool
) -> Snapshot:
    """Take a snapshot of parameters and optimizer state. is_copied: whether to copy them to host memory.

    reused: tensors of an earlier snapshot, which are overwritten.
    """
    kinds = (PARAMETER, *state_form(optimizer).tensors)
    tensors = {}
    on_device = False
    for piece in ranges:
        for kind in kinds if piece.stop > piece.start else ():
            values = piece.values(kind, optimizer)
            key = tensor_key(kind, piece.name)
            on_device |= values.is_cuda
            if not is_copied:
                tensors[key] = values
                continue
            copy = reused.get(key)
            if copy is None:
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            tensors[key] = copy.copy_(values, non_blocking=True)
    if on_device:
        # Wait for the copies or, without copies, for the end of the step whose results another thread will read.
        torch.cuda.synchronize()
    return Snapshot(
        tensors,
        tuple(
            RangeEntry(
                name=piece.name, shape=list(piece.shape), dtype=dtype_name(piece.holder.dtype), start=piece.start, stop=piece.stop
            )
            for piece in ranges
        ),
    )


def write_rank_file(path: Path, snapshot: Snapshot) -> FileEntry:
    """Write a snapshot durably, and return the file's entry for the manifest. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for part in _parts(snapshot.tensors):
            chunk = part
            digest.update(chunk)
            size += len(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return FileEntry(name=path.name, size=size, sha256=digest.hexdigest(), pieces=list(snapshot.pieces))


def _header(tensors: Mapping[str, torch.Tensor]) -> memoryview:
    content, offset = {}, 0
    for key, tensor in tensors.items():
        stop = offset + tensor.numel() * tensor.element_size()
        content[key] = {"dtype": _NAMES_OF_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(content, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return memoryview(struct.pack("<Q", len(encoded)) + encoded)


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yield the header and the values in small parts, so that only a few of a GPU's values are in host memory at a time."""
    yield _header(tensors)
    for tensor in tensors.values():
        values = tensor.view(torch.uint8)
        for start in range(0, len(values), _CHUNK_BYTES):
            yield values[start : start + _CHUNK_BYTES].cpu().numpy().data

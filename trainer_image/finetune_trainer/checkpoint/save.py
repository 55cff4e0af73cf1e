"""Write a checkpoint: temporary directory, every file durable, manifest, rename, `latest`, and only then old ones go."""

from __future__ import annotations

import logging
import shutil
import uuid
from pathlib import Path

import torch
from safetensors.torch import save_file

from finetune_trainer.checkpoint.manifest import FileEntry, Manifest, PieceEntry, RunState
from finetune_trainer.checkpoint.names import LATEST, MANIFEST, directory_name, rank_file, tensor_key
from finetune_trainer.checkpoint.retention import prune
from finetune_trainer.checkpoint.state import KINDS, Piece, optimizer_step
from finetune_trainer.files import TEMPORARY_MARK, file_sha256, publish_directory, sync_file, write_durably
from finetune_trainer.gang import Gang

log = logging.getLogger(__name__)


def save(
    root: Path,
    *,
    step: int,
    found: list[Piece],
    optimizer: torch.optim.Optimizer,
    gang: Gang,
    plan_sha256: str,
    data_hash: str,
    state: RunState,
    keep: int,
) -> tuple[Path, Manifest]:
    """Save after optimizer step `step`; called by all ranks together. The checkpoint's directory and manifest, on every rank.

    Killed at any moment, it leaves either no checkpoint of this step or a complete one. Raises OSError as the file system does.
    """
    final = root / directory_name(step)
    temporary = root / gang.from_first(f"{final.name}{TEMPORARY_MARK}{uuid.uuid4().hex}")
    if gang.is_first:
        temporary.mkdir(parents=True)
    gang.barrier()
    entry = _write_rank_file(temporary, found, optimizer, gang.rank)
    files: list[FileEntry] = [FileEntry.model_validate(value) for value in gang.gather(entry.model_dump())]
    manifest = Manifest(
        step=step,
        optimizer_step=optimizer_step(optimizer),
        plan_sha256=plan_sha256,
        data_hash=data_hash,
        world_size=gang.world_size,
        state=state,
        files=files,
    )
    if gang.is_first:
        write_durably(temporary / MANIFEST, manifest.encode())
        if final.exists():
            # Only a checkpoint that was refused while loading can stand here: a valid one would have been resumed from.
            shutil.rmtree(final)
        publish_directory(temporary, final)
        write_durably(root / LATEST, f"{final.name}\n".encode())
        prune(root, keep, plan_sha256, data_hash)
        log.info("checkpoint of step %d is complete", step)
    gang.barrier()
    return final, manifest


def _write_rank_file(directory: Path, found: list[Piece], optimizer: torch.optim.Optimizer, rank: int) -> FileEntry:
    path = directory / rank_file(rank)
    tensors = {
        tensor_key(kind, piece.name): piece.values(kind, optimizer).cpu().contiguous().clone()
        for piece in found
        for kind in KINDS
        if piece.stop > piece.start
    }
    save_file(tensors, path)
    sync_file(path)
    return FileEntry(
        name=path.name,
        size=path.stat().st_size,
        sha256=file_sha256(path),
        pieces=[
            PieceEntry(
                name=piece.name,
                shape=list(piece.shape),
                dtype=str(piece.holder.dtype).removeprefix("torch."),
                start=piece.start,
                stop=piece.stop,
            )
            for piece in found
        ],
    )

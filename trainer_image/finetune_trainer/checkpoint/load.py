"""Find the newest valid checkpoint and read from it, whatever world size and sharding wrote it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from finetune_trainer.checkpoint.manifest import Manifest, PieceEntry, read, verify_file
from finetune_trainer.checkpoint.names import tensor_key
from finetune_trainer.checkpoint.retention import checkpoint_directories, remove_leftovers
from finetune_trainer.checkpoint.state import KINDS, PARAMETER, Piece, create_moments, optimizer_step, set_optimizer_step
from finetune_trainer.errors import CheckpointError, InvariantError
from finetune_trainer.gang import Gang

log = logging.getLogger(__name__)


def newest_valid(root: Path, gang: Gang, plan_sha256: str, data_hash: str) -> tuple[Path, Manifest] | None:
    """The newest checkpoint of which every byte is as written, agreed by all ranks; the ranks share the hashing.

    Corrupt, truncated, foreign and incomplete ones are logged and passed over.
    """
    if gang.is_first:
        remove_leftovers(root)
    names = gang.from_first([path.name for path in checkpoint_directories(root)])
    for name in names:
        problem = ""
        manifest = None
        try:
            manifest = read(root / name, plan_sha256, data_hash)
            for entry in manifest.files[gang.rank :: gang.world_size]:
                verify_file(root / name, entry)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        problems = [text for text in gang.gather(problem) if text]
        if not problems and manifest is not None:
            return root / name, manifest
        if gang.is_first:
            log.warning("checkpoint %s is not used: %s", name, "; ".join(problems))
    return None


def load(directory: Path, manifest: Manifest, found: list[Piece], optimizer: torch.optim.Optimizer) -> None:
    """Fill parameters and moments of these pieces. Raises CheckpointError where the checkpoint does not cover one of them."""
    create_moments(optimizer)
    reader = PieceReader(directory, manifest)
    with torch.no_grad():
        for piece in found:
            reader.check_shape(piece.name, piece.shape)
            for kind in KINDS:
                reader.read_into(kind, piece.name, piece.start, piece.values(kind, optimizer))
    if reader.names != {piece.name for piece in found}:
        raise CheckpointError(f"{directory}: holds other parameters than are trained: {sorted(reader.names)[:3]}...")
    set_optimizer_step(optimizer, manifest.optimizer_step)
    if optimizer_step(optimizer) != manifest.optimizer_step and any(piece.stop > piece.start for piece in found):
        raise InvariantError(f"{directory}: the optimizer is at another step after loading than the manifest says")


def full_parameters(directory: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Each trained parameter, whole, one after the other. Raises CheckpointError."""
    reader = PieceReader(directory, manifest)
    for name in sorted(reader.names):
        shape, dtype = reader.form(name)
        tensor = torch.empty(shape, dtype=dtype)
        reader.read_into(PARAMETER, name, 0, tensor.view(-1))
        yield name, tensor


class PieceReader:
    """Reads any range of any parameter from the files of a checkpoint."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._stored: dict[str, list[tuple[str, PieceEntry]]] = {}
        for file in manifest.files:
            for entry in file.pieces:
                self._stored.setdefault(entry.name, []).append((file.name, entry))

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def form(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Global shape and element type."""
        entry = self._stored[name][0][1]
        return tuple(entry.shape), getattr(torch, entry.dtype)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError where the stored parameter has another shape or does not exist."""
        stored: Mapping[str, list[tuple[str, PieceEntry]]] = self._stored
        if name not in stored or self.form(name)[0] != shape:
            raise CheckpointError(f"{self._directory}: holds no {name} of shape {shape}")

    def read_into(self, kind: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-dimensional `target` with the elements from `start` on. Raises CheckpointError where some are not stored."""
        stop = start + target.numel()
        filled = 0
        for file, entry in self._stored[name]:
            first, last = max(start, entry.start), min(stop, entry.stop)
            if first >= last:
                continue
            with safe_open(self._directory / file, framework="pt") as tensors:
                part = tensors.get_slice(tensor_key(kind, name))[first - entry.start : last - entry.start]
            if part.dtype != target.dtype:
                raise CheckpointError(f"{self._directory}: {name} is stored as {part.dtype}, held as {target.dtype}")
            target[first - start : last - start].copy_(part)
            filled += last - first
        if filled != target.numel():
            raise CheckpointError(f"{self._directory}: {kind} of {name} has {filled} of {target.numel()} elements")

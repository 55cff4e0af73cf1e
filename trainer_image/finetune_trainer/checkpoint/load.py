"""Finds the newest valid checkpoint and reads from it, whatever its world size and sharding."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from finetune_job.layout import checkpoint_step
from finetune_trainer.checkpoint.manifest import Manifest, Origin, RangeEntry, read_manifest, tensor_key, verify_file
from finetune_trainer.checkpoint.retention import checkpoint_directories, remove_leftovers
from finetune_trainer.checkpoint.start import START_FIELD, START_HINT, start_problem
from finetune_trainer.checkpoint.state import PARAMETER, ParameterRange, check_kind, create_state, restore_count, state_form
from finetune_trainer.errors import CheckpointError, ForeignCheckpointError
from finetune_trainer.ranks.gang import EntryName, Gang

log = logging.getLogger(__name__)


def newest_valid(root: Path, gang: Gang, origin: Origin) -> tuple[Path, Manifest] | None:
    """Find the newest intact checkpoint. The ranks share the hashing, and all get the same result.

    Corrupt, truncated and incomplete checkpoints, and those of other runs, are logged and skipped.
    """
    if gang.is_first:
        remove_leftovers(root)
    names = gang.from_first([path.name for path in checkpoint_directories(root)], list[EntryName])
    for name in names:
        manifest, problems = verified_manifest(root / name, gang, origin)
        if manifest is not None:
            return root / name, manifest
        if gang.is_first:
            log.warning("checkpoint %s is not used: %s", name, "; ".join(problems))
    return None


def verified_manifest(directory: Path, gang: Gang, origin: Origin | None) -> tuple[Manifest | None, list[str]]:
    """Return the manifest (None if the checkpoint is not intact) and the problems found; both are the same on all ranks.

    origin: None accepts a checkpoint of any run.
    """
    problem = ""
    manifest = None
    try:
        manifest = read_manifest(directory, origin)
        for entry in manifest.files[gang.rank :: gang.world_size]:
            verify_file(directory, entry)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    problems = [text for text in gang.gather(problem, str) if text]
    return (None if problems else manifest), problems


def unusable_checkpoints(root: Path, gang: Gang, origin: Origin) -> dict[str, str]:
    """Map each of this run's checkpoints to its problem, newest first; the same on all ranks. Call this if none can be used.

    A save ends with a rename, so a directory with a checkpoint's name was once complete. It counts as another run's only if its
    manifest says so: a directory without a readable manifest might be all that is left of this run's progress.
    """
    unusable: dict[str, str] = {}
    if gang.is_first:
        for directory in checkpoint_directories(root):
            problem = _manifest_problem(directory, origin)
            if not isinstance(problem, ForeignCheckpointError):
                unusable[directory.name] = str(problem or f"{directory}: a file is not what was written")
    return gang.from_first(unusable, dict[str, str])


def newest_foreign_step(root: Path, origin: Origin) -> int:
    """Step of the newest checkpoint whose run learns something else; 0 if there is none. Ranks need not call this together."""
    for directory in checkpoint_directories(root):
        if isinstance(_manifest_problem(directory, origin), ForeignCheckpointError):
            return checkpoint_step(directory.name) or 0
    return 0


def _manifest_problem(directory: Path, origin: Origin) -> CheckpointError | OSError | None:
    """Return the error raised by reading a checkpoint's manifest; None if the manifest is readable and belongs to this run."""
    try:
        read_manifest(directory, origin)
    except (CheckpointError, OSError) as error:
        return error
    return None


def load(directory: Path, manifest: Manifest, ranges: list[ParameterRange], optimizer: torch.optim.Optimizer) -> None:
    """Load parameters and optimizer state of these ranges, and check that nothing is left out.

    Call this before the first forward pass, since FSDP 2 may keep gathered weights after it. Raises CheckpointError if the
    checkpoint does not cover a range.
    """
    check_kind(optimizer, manifest.optimizer)
    create_state(optimizer)
    kinds = (PARAMETER, *state_form(optimizer).tensors)
    reader = RangeReader(directory, manifest)
    with torch.no_grad():
        for piece in ranges:
            reader.check_shape(piece.name, piece.shape)
            for kind in kinds:
                reader.read_into(kind, piece.name, piece.start, piece.values(kind, optimizer))
    if reader.names != {piece.name for piece in ranges}:
        raise CheckpointError(f"{directory} holds parameters other than those that are trained: {sorted(reader.names)[:3]}...")
    restore_count(optimizer, manifest.optimizer)


def load_start(directory: Path, gang: Gang, ranges: list[ParameterRange], origin: Origin) -> None:
    """Load the trained parameters of another run's checkpoint into these ranges, without the optimizer state.

    origin: this run's own, including its first values. Call this before the first forward pass. Raises CheckpointError on all
    ranks if the checkpoint is incomplete or does not fit.
    """
    manifest, problems = verified_manifest(directory, gang, None)
    if manifest is None:
        raise CheckpointError(f"{START_FIELD}: {'; '.join(problems)}", START_HINT)
    problem = start_problem(directory, manifest, {piece.name: piece.shape for piece in ranges}, origin)
    if not problem and manifest.origin.first_values != origin.first_values:
        problem = f"{directory} was trained from other first values, which are computed from the base and are not stored in it"
    if problem:
        raise CheckpointError(f"{START_FIELD}: {problem}", START_HINT)
    reader = RangeReader(directory, manifest)
    with torch.no_grad():
        for piece in ranges:
            reader.read_into(PARAMETER, piece.name, piece.start, piece.parameter_values())


def full_parameters(directory: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and all values of each trained parameter in turn. Raises CheckpointError."""
    reader = RangeReader(directory, manifest)
    for name in sorted(reader.names):
        yield name, reader.whole(name)


class RangeReader:
    """Reads any range of any parameter from the files of a checkpoint."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._stored: dict[str, list[tuple[str, RangeEntry]]] = {}
        for file in manifest.files:
            for entry in file.pieces:
                self._stored.setdefault(entry.name, []).append((file.name, entry))

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def form(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Global shape and element type of a parameter."""
        entry = self._stored[name][0][1]
        return tuple(entry.shape), getattr(torch, entry.dtype)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError if the parameter is not stored in this shape."""
        stored: Mapping[str, list[tuple[str, RangeEntry]]] = self._stored
        if name not in stored or self.form(name)[0] != shape:
            raise CheckpointError(f"{self._directory} holds no {name} of shape {shape}")

    def whole(self, name: str) -> torch.Tensor:
        """Read the values of one parameter. Raises CheckpointError."""
        shape, dtype = self.form(name)
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into(PARAMETER, name, 0, tensor.view(-1))
        return tensor

    def read_into(self, kind: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill 1-dimensional `target` with a parameter's elements from `start` on. Raises CheckpointError if any is missing."""
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

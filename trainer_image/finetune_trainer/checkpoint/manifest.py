"""Names inside the checkpoint directory, and the manifest that proves a checkpoint.

step-0000000100/             complete by its name alone
    rank-00000.safetensors   one per rank
    manifest.json            written last: files, sizes, digests, and which range of which parameter is where
step-0000000200.tmp-<uuid>/  being written, or left by a killed run
latest                       name of the newest complete checkpoint; loading scans instead, and asks it only if nothing is found
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune_job.layout import checkpoint_name
from finetune_trainer.errors import CheckpointError, ForeignCheckpointError
from finetune_trainer.files import file_sha256, read_own

MANIFEST = "manifest.json"
LATEST = "latest"


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """Key inside a rank's file."""
    return f"{kind}/{name}"


class ManifestModel(BaseModel):
    """Immutable; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RangeEntry(ManifestModel):
    """Elements [start, stop) of a flattened parameter."""

    name: str
    shape: list[int]
    dtype: str
    start: int
    stop: int


class FileEntry(ManifestModel):
    """One rank's file."""

    name: str
    size: int
    sha256: str
    pieces: list[RangeEntry]


class LossScale(ManifestModel):
    """Factor of the loss, and the steps in a row in which no gradient overflowed with it."""

    factor: float
    steps: int = 0


class RunState(ManifestModel):
    """What a resumed run needs besides tensors."""

    initial_eval_loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    """Lowest after the first step; None before the first evaluation of trained weights."""
    best_step: int | None = None
    evaluations_without_improvement: int = 0
    loss_scale: LossScale | None = None
    """None: no loss was scaled yet."""


class Origin(ManifestModel):
    """The run that a checkpoint belongs to; ranks, sharding and micro-batches may change between its attempts."""

    learning_sha256: str
    """Digest of what the run learns."""
    data_hash: str
    first_values: str | None = None
    """SHA-256 of what the adapters started with, where that was computed from the base's weights."""
    added_tokens: list[str] = []
    """Tokens that the run added to the base, in the order of their rows."""


class OptimizerEntry(ManifestModel):
    """Which optimizer state each trainable parameter has."""

    name: str
    tensors: list[str]
    """Kinds of tensors with one value per element."""
    step: float | None
    """The count that every parameter's state holds; None: the optimizer keeps none."""


class Manifest(ManifestModel):
    """Content of manifest.json."""

    version: Literal[1] = 1
    step: int
    """Optimizer steps done."""
    optimizer: OptimizerEntry
    origin: Origin
    world_size: int
    best_step: int | None = None
    """The best checkpoint that was complete at this step, this one included."""
    state: RunState
    files: list[FileEntry]

    def encode(self) -> bytes:
        """Canonical JSON with its own digest, so that any changed byte shows."""
        # As in the releases that knew none.
        left_out = {"origin": {name for name in ("first_values", "added_tokens") if not getattr(self.origin, name)}}
        body = self.model_dump(mode="json", exclude=left_out)
        return _canonical({**body, "sha256": _digest(body)})


def decode_manifest(encoded: bytes) -> Manifest:
    """The manifest in `encoded`. Raises CheckpointError if a byte is not what was written."""
    try:
        body = json.loads(encoded)
        announced = body.pop("sha256")
        if announced != _digest(body) or encoded != _canonical({**body, "sha256": announced}):
            raise CheckpointError(f"{MANIFEST}: was changed after it was written")
        return Manifest.model_validate(body)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError) as error:
        raise CheckpointError(f"{MANIFEST}: cannot be read ({type(error).__name__}: {error})") from error


def read_manifest(directory: Path, origin: Origin | None) -> Manifest:
    """The manifest of a checkpoint of this run and data, sizes compared, digests of files not yet. Raises CheckpointError.

    origin: None: of whatever run.
    """
    try:
        manifest = decode_manifest(read_own(directory / MANIFEST))
    except OSError as error:
        raise CheckpointError(f"{directory / MANIFEST}: cannot be read ({error})") from error
    if directory.name != checkpoint_name(manifest.step):
        raise CheckpointError(f"{directory}: holds the checkpoint of step {manifest.step}, which its name does not say")
    if origin is not None:
        _check_origin(directory, manifest.origin, origin)
    if [entry.name for entry in manifest.files] != [rank_file(rank) for rank in range(manifest.world_size)]:
        raise CheckpointError(f"{directory}: does not list one file for each of {manifest.world_size} ranks")
    for entry in manifest.files:
        path = directory / entry.name
        # What a link points to may change after it was verified.
        size = path.stat().st_size if path.is_file() and not path.is_symlink() else None
        if size != entry.size:
            raise CheckpointError(
                f"{path}: " + ("is missing" if size is None else f"has {size} bytes, {entry.size} were written")
            )
    return manifest


def _check_origin(directory: Path, found: Origin, origin: Origin) -> None:
    if found.learning_sha256 != origin.learning_sha256:
        raise ForeignCheckpointError(f"{directory}: belongs to run {found.learning_sha256}, this is {origin.learning_sha256}")
    if found.data_hash != origin.data_hash:
        raise CheckpointError(f"{directory}: was trained on data {found.data_hash}, prepared is {origin.data_hash}")
    if found.first_values != origin.first_values:
        raise CheckpointError(
            f"{directory}: was trained from first values {found.first_values}, computed are {origin.first_values}"
        )


def verify_file(directory: Path, entry: FileEntry) -> None:
    """Compare the file's digest. Raises CheckpointError."""
    found = file_sha256(directory / entry.name)
    if found != entry.sha256:
        raise CheckpointError(f"{directory / entry.name}: has sha256 {found}, {entry.sha256} was written")


def _canonical(value: dict[str, object]) -> bytes:
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False) + "\n").encode()


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()

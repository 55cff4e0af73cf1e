"""Names inside the checkpoint directory, and the manifest that proves that a checkpoint is complete and undamaged.

step-0000000100/             complete, as the name alone shows
    rank-00000.safetensors   one per rank
    manifest.json            written last: files, sizes, digests, and which range of which parameter is where
step-0000000200.tmp-<uuid>/  being written, or left by a killed run
latest                       name of the newest complete checkpoint; loading scans the directory, and uses this only as evidence
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

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
    """Key of a tensor in a rank's file."""
    return f"{kind}/{name}"


class ManifestModel(BaseModel):
    """Base class of the manifest's parts, which are immutable and refuse unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RangeEntry(ManifestModel):
    """A range of a parameter: elements [start, stop) of its flattened values."""

    name: str
    shape: list[int]
    dtype: str
    start: int
    stop: int


class FileEntry(ManifestModel):
    """The file of one rank."""

    name: str
    size: int
    sha256: str
    pieces: list[RangeEntry]


class LossScale(ManifestModel):
    """The loss scale, and the number of consecutive steps in which no gradient has overflowed at this scale."""

    factor: float
    steps: int = 0


class RunState(ManifestModel):
    """The state, other than tensors, that a resumed run needs."""

    initial_eval_loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    """Lowest loss in any evaluation of trained weights; None before the first such evaluation."""
    best_step: int | None = None
    evaluations_without_improvement: int = 0
    loss_scale: LossScale | None = None
    """The loss scale of the next step; None if no loss has been scaled yet."""


class Origin(ManifestModel):
    """The run to which a checkpoint belongs. Ranks, sharding and micro-batches may change between attempts of a run."""

    learning_sha256: str
    """Digest of what the run learns."""
    data_hash: str
    first_values: str | None = None
    """SHA-256 of the file with the adapters' first values, if these are computed from the base's weights."""
    added_tokens: list[str] = []
    """Tokens that the run added to the base, in the order of their rows."""
    base_sha256: str | None = None
    """Digest of the base's weights (weights/base_identity.py); None if unknown."""
    method: dict[str, Any] = {}
    """Settings that, besides names and shapes, determine what the parameters mean."""


class OptimizerEntry(ManifestModel):
    """Describes the optimizer state, which has the same form for each trainable parameter."""

    name: str
    tensors: list[str]
    """Names of the state tensors that have one value per element of the parameter."""
    step: float | None
    """The step count in every parameter's state; None if the optimizer keeps no count."""


class Manifest(ManifestModel):
    """Content of manifest.json."""

    version: Literal[1] = 1
    step: int
    """Number of completed optimizer steps."""
    optimizer: OptimizerEntry
    origin: Origin
    world_size: int
    best_step: int | None = None
    """Step of the best checkpoint so far, including this one."""
    state: RunState
    files: list[FileEntry]

    def encode(self) -> bytes:
        """Encode as canonical JSON that includes its own digest, so that any changed byte is detected."""
        # Earlier releases did not have these fields, so they are left out if they are empty.
        later = Origin.model_fields.keys() - {"learning_sha256", "data_hash"}
        left_out = {"origin": {name for name in later if not getattr(self.origin, name)}}
        body = self.model_dump(mode="json", exclude=left_out)
        return _canonical({**body, "sha256": _digest(body)})


def decode_manifest(encoded: bytes) -> Manifest:
    """Decode a manifest. Raises CheckpointError if any byte was changed."""
    try:
        body = json.loads(encoded)
        announced = body.pop("sha256")
        if announced != _digest(body) or encoded != _canonical({**body, "sha256": announced}):
            raise CheckpointError(f"{MANIFEST} was changed after it was written")
        return Manifest.model_validate(body)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error


def read_manifest(directory: Path, origin: Origin | None) -> Manifest:
    """Read a manifest, and check that it belongs to this run and data, and that the file sizes match. Raises CheckpointError.

    origin: None accepts a checkpoint of any run. The digests of the files are not checked here.
    """
    try:
        manifest = decode_manifest(read_own(directory / MANIFEST))
    except OSError as error:
        raise CheckpointError(f"{directory / MANIFEST} cannot be read ({error})") from error
    if directory.name != checkpoint_name(manifest.step):
        raise CheckpointError(f"{directory} holds the checkpoint of step {manifest.step}, but is named for another step")
    if origin is not None:
        _check_origin(directory, manifest.origin, origin)
    if [entry.name for entry in manifest.files] != [rank_file(rank) for rank in range(manifest.world_size)]:
        raise CheckpointError(f"{directory} does not list one file for each of {manifest.world_size} ranks")
    for entry in manifest.files:
        path = directory / entry.name
        # Links are refused, because the target of a link may change after it was verified.
        size = path.stat().st_size if path.is_file() and not path.is_symlink() else None
        if size != entry.size:
            raise CheckpointError(
                f"{path} " + ("is missing" if size is None else f"has {size} bytes, but {entry.size} were written")
            )
    return manifest


def _check_origin(directory: Path, stored: Origin, origin: Origin) -> None:
    if stored.learning_sha256 != origin.learning_sha256:
        raise ForeignCheckpointError(f"{directory} belongs to run {stored.learning_sha256}, not to {origin.learning_sha256}")
    if stored.data_hash != origin.data_hash:
        raise CheckpointError(f"{directory} was trained on data {stored.data_hash}, but {origin.data_hash} is prepared")
    if stored.first_values != origin.first_values:
        raise CheckpointError(
            f"{directory} was trained from first values {stored.first_values}, but {origin.first_values} were computed"
        )


def verify_file(directory: Path, entry: FileEntry) -> None:
    """Compare the file's digest with its entry. Raises CheckpointError."""
    sha256 = file_sha256(directory / entry.name)
    if sha256 != entry.sha256:
        raise CheckpointError(f"{directory / entry.name} has sha256 {sha256}, but {entry.sha256} was written")


def _canonical(value: dict[str, object]) -> bytes:
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False) + "\n").encode()


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()

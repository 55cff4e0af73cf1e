"""What prepared data is on disk, and the proof that it is whole.

    prepared/
      manifest.json                  last, so that data without it is not data
      train/, validation/            one directory per split, see SPLIT_FILES

Each data shard is a plain numpy array that readers map instead of loading. Written to a temporary directory and renamed, so that
the name `prepared` only ever holds complete data. The manifest holds size and SHA-256 of each shard and a digest of itself: the
data hash, which names the data in status and reports. Written by prepare.py, read by batches.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.errors import DataError
from finetune_trainer.files import (
    TEMPORARY_MARK,
    file_sha256,
    publish_directory,
    sync_directory,
    sync_file,
    temporary_beside,
    write_durably,
)

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
TRAIN, VALIDATION = "train", "validation"

Array = NDArray[Any]


class PreparedDataError(DataError):
    """Prepared data is missing, incomplete or changed; it must be prepared again, never used."""

    def __init__(self, path: Path, reason: str, prepared: Path) -> None:
        super().__init__(f"{path}: {reason}", f"delete {prepared} and run preflight again, it prepares the data anew")


@dataclass(frozen=True)
class SplitArrays:
    """One split, ready to be written. Documents and sequences lie in order, without gaps.

    `tokens` int32 [num_tokens]; `supervised` bool [num_tokens]: whether the loss counts the prediction of this token;
    `document_ends` int64 [num_documents]: exclusive end of each document in `tokens`;
    `sequence_ends` int64 [num_sequences]: exclusive end of each sequence in `document_ends`;
    `supervised_tokens` int64 [num_sequences].
    """

    tokens: Array
    supervised: Array
    document_ends: Array
    sequence_ends: Array
    supervised_tokens: Array


SPLIT_FILES: Mapping[str, str] = {
    "tokens": "<i4",
    "supervised": "|b1",
    "document_ends": "<i8",
    "sequence_ends": "<i8",
    "supervised_tokens": "<i8",
}
"""Field of SplitArrays -> element type of its file `<field>.npy`."""


def write_prepared(directory: Path, splits: Mapping[str, SplitArrays], facts: Mapping[str, Any]) -> str:
    """Write `splits` and a manifest that also holds `facts` (JSON values) to `directory`; the data hash.

    What stood there before is replaced; a crash at any moment leaves the old data, or none, but never half of the new.
    Raises OSError as the file system does; the temporary directory is removed then.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    staging = temporary_beside(directory)
    try:
        files: dict[str, dict[str, Any]] = {}
        for split, arrays in splits.items():
            (staging / split).mkdir(parents=True)
            for field, element_type in SPLIT_FILES.items():
                path = staging / split / f"{field}.npy"
                np.save(path, np.asarray(getattr(arrays, field), dtype=element_type), allow_pickle=False)
                sync_file(path)
                files[f"{split}/{field}.npy"] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            sync_directory(staging / split)
        body = {"version": FORMAT_VERSION, "files": files, **facts}
        data_hash = _digest(body)
        write_durably(staging / MANIFEST_FILE, _encoded({**body, "data_hash": data_hash}))
        if directory.exists():
            shutil.rmtree(directory)
        publish_directory(staging, directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return data_hash


def remove_leftovers(directory: Path) -> None:
    """Remove temporary directories of preparations that were killed. Only one preflight pod of a job runs at a time."""
    for path in directory.parent.glob(f"{directory.name}{TEMPORARY_MARK}*"):
        shutil.rmtree(path, ignore_errors=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, checked against its own digest. Raises PreparedDataError."""
    path = directory / MANIFEST_FILE
    try:
        encoded = path.read_bytes()
        manifest = json.loads(encoded)
    except (OSError, ValueError) as error:
        raise PreparedDataError(path, f"cannot be read ({error})", directory) from error
    if not isinstance(manifest, dict):
        raise PreparedDataError(path, "holds no JSON object", directory)
    body = {key: value for key, value in manifest.items() if key != "data_hash"}
    if manifest.get("data_hash") != _digest(body) or encoded != _encoded(manifest):
        raise PreparedDataError(path, "was changed after it was written", directory)
    if manifest["version"] != FORMAT_VERSION:
        raise PreparedDataError(path, f"has version {manifest['version']}, this trainer reads {FORMAT_VERSION}", directory)
    return manifest


def verify_files(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Compare size and SHA-256 of every shard with the manifest. Raises PreparedDataError naming the file."""
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            raise PreparedDataError(path, "is missing", directory)
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise PreparedDataError(path, f"has {size} bytes, {expected['bytes']} were written", directory)
        if file_sha256(path) != expected["sha256"]:
            raise PreparedDataError(path, "has other content than was written", directory)


def map_split(directory: Path, split: str) -> SplitArrays:
    """The arrays of one split, mapped read-only. Call after `verify_files`."""
    return SplitArrays(
        **{field: np.load(directory / split / f"{field}.npy", mmap_mode="r", allow_pickle=False) for field in SPLIT_FILES}
    )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_encoded(body)).hexdigest()


def _encoded(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON, so that each change of a byte is a change of the content or of the form, and both are noticed."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()

"""Defines the layout of prepared data on disk, and checks that it is complete.

    prepared/
        manifest.json             written last: data without it is incomplete
        train/, validation/       one directory per split:
            tokens-00000.i4, ...  tokens of all documents, document after document; see TOKENS_PER_SHARD
            <table>.i8            one array of int64 each; see TABLES

Each file is a plain little-endian array. A token that the loss does not count is stored as the bitwise complement of its id, so
that one read gives ids and mask. Sequences are lists of documents, so no tokens are rearranged, and a document that occurs twice
is stored once. The data is written to a temporary directory, which is then renamed, so that `prepared` only ever holds complete
data. The manifest holds size and SHA-256 of each file and a digest of itself: the data hash, which identifies the data in status
and reports. shard_writer.py writes the data, batches.py reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.data.cpus import available_cpus
from finetune_trainer.data.findings import TRAIN as TRAIN  # noqa: PLC0414 - for readers of prepared data
from finetune_trainer.data.findings import VALIDATION as VALIDATION  # noqa: PLC0414
from finetune_trainer.errors import DataError
from finetune_trainer.files import file_sha256, read_own

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 2
TOKEN_TYPE, TABLE_TYPE = np.dtype("<i4"), np.dtype("<i8")
TOKENS_PER_SHARD = 1 << 28
"""Number of tokens in every shard but the last; a full shard takes 1 GiB."""
TABLES = ("document_ends", "sequence_documents", "sequence_ends", "supervised_tokens")
"""Fields of SplitTables, each of which is stored in a file."""

Array = NDArray[Any]


class PreparedDataError(DataError):
    """Prepared data is missing, incomplete or changed. It must not be used, and has to be prepared again."""

    def __init__(self, path: Path, reason: str, prepared: Path) -> None:
        super().__init__(f"{path}: {reason}", f"delete {prepared} and run preflight again, which prepares the data again")


@dataclass(frozen=True)
class SplitTables:
    """The documents and sequences of one split, as arrays of int64.

    `document_ends` [num_documents]: exclusive end of each document in the tokens;
    `sequence_documents` [num_occurrences]: documents of the sequences, sequence after sequence;
    `sequence_ends` [num_sequences]: exclusive end of each sequence in `sequence_documents`;
    `supervised_tokens` [num_sequences]: number of supervised tokens of each sequence.
    """

    document_ends: Array
    sequence_documents: Array
    sequence_ends: Array
    supervised_tokens: Array


@dataclass(frozen=True)
class SplitArrays:
    """A split in memory, whose sequences hold each document once and in order. Documents are contiguous.

    `tokens` int32 [num_tokens]; `supervised` bool [num_tokens]: whether the loss counts the prediction of this token. The other
    fields are as in SplitTables.
    """

    tokens: Array
    supervised: Array
    document_ends: Array
    sequence_ends: Array
    supervised_tokens: Array

    @property
    def tables(self) -> SplitTables:
        documents = np.arange(len(self.document_ends))
        return SplitTables(self.document_ends, documents, self.sequence_ends, self.supervised_tokens)

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        """Ids (int32) and mask (bool) of the tokens [start, stop) of the split."""
        return self.tokens[start:stop], self.supervised[start:stop]


class TokenShards:
    """The tokens of a split on disk. They are read, not mapped, as mapped pages would count as resident memory of each rank."""

    def __init__(self, directory: Path, split: str) -> None:
        self._prepared = directory
        self._files = [path.open("rb", buffering=0) for path in sorted((directory / split).glob(shard_name(None)))]

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        """Ids and mask, as from `SplitArrays.read`. Raises PreparedDataError if a file has become shorter since it was
        verified.
        """
        stored = np.empty(stop - start, dtype=TOKEN_TYPE)
        view, position, filled = stored.data.cast("B"), start, 0
        while filled < len(view):
            number, within = divmod(position, TOKENS_PER_SHARD)
            file = self._files[number]
            wanted = min(len(view) - filled, (TOKENS_PER_SHARD - within) * TOKEN_TYPE.itemsize)
            num_read = os.preadv(file.fileno(), [view[filled : filled + wanted]], within * TOKEN_TYPE.itemsize)
            if num_read == 0 or num_read % TOKEN_TYPE.itemsize:
                raise PreparedDataError(Path(file.name), "became shorter while it was in use", self._prepared)
            filled += num_read
            position += num_read // TOKEN_TYPE.itemsize
        return decode(stored)


def shard_name(number: int | None) -> str:
    """The file name of the token shard with this number; None: a glob pattern for all token shards."""
    return f"tokens-{'*' if number is None else f'{number:05d}'}.i4"


def encode(tokens: Array, supervised: Array) -> Array:
    """Encode ids and mask into the stored form."""
    ids = np.asarray(tokens, dtype=TOKEN_TYPE)
    return np.where(supervised, ids, ~ids)


def decode(stored: Array) -> tuple[Array, Array]:
    """Decode the stored form into ids and mask."""
    supervised = stored >= 0
    return np.where(supervised, stored, ~stored), supervised


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest and check it against its own digest. Raises PreparedDataError."""
    path = directory / MANIFEST_FILE
    try:
        encoded = read_own(path)
        manifest = json.loads(encoded)
    except (OSError, ValueError) as error:
        raise PreparedDataError(path, f"cannot be read ({error})", directory) from error
    if not isinstance(manifest, dict):
        raise PreparedDataError(path, "holds no JSON object", directory)
    body = {key: value for key, value in manifest.items() if key != "data_hash"}
    if manifest.get("data_hash") != manifest_digest(body) or encoded != encoded_manifest(manifest):
        raise PreparedDataError(path, "was changed after it was written", directory)
    if manifest["version"] != FORMAT_VERSION:
        raise PreparedDataError(path, f"has version {manifest['version']}, this trainer reads {FORMAT_VERSION}", directory)
    return manifest


def verify_files(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Compare size and SHA-256 of every file with the manifest, several files at once. Raises PreparedDataError."""

    def verify(name: str) -> None:
        path, expected = directory / name, manifest["files"][name]
        if not path.is_file():
            raise PreparedDataError(path, "is missing", directory)
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise PreparedDataError(path, f"has {size} bytes, {expected['bytes']} were written", directory)
        if file_sha256(path) != expected["sha256"]:
            raise PreparedDataError(path, "has other content than was written", directory)

    with ThreadPoolExecutor(available_cpus()) as threads:
        list(threads.map(verify, sorted(manifest["files"])))


def map_tables(directory: Path, split: str) -> SplitTables:
    """Map the tables of one split into memory, read-only. Call this after `verify_files`."""
    return SplitTables(**{table: np.memmap(directory / split / table_name(table), TABLE_TYPE, mode="r") for table in TABLES})


def table_name(table: str) -> str:
    return f"{table}.i8"


def manifest_digest(body: Mapping[str, Any]) -> str:
    """The data hash of a manifest. body: the manifest without the hash."""
    return hashlib.sha256(encoded_manifest(body)).hexdigest()


def encoded_manifest(value: Mapping[str, Any]) -> bytes:
    """Encode as canonical JSON, so that any changed byte is noticed, even if it changes only the formatting."""
    # Numeric keys become strings in JSON, which sort differently, so they are converted before they are sorted.
    value = json.loads(json.dumps(value, allow_nan=False))
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()

"""Writes prepared data, which is appended to files in a temporary directory and then published in one step.

Older data under the final name is replaced only by that step. A crash at any moment leaves the old data, or none, but never half
of the new data. shards.py describes the format.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from finetune_trainer.data.packing import PlanWindow
from finetune_trainer.data.shards import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TABLE_TYPE,
    TABLES,
    TOKEN_TYPE,
    TOKENS_PER_SHARD,
    Array,
    SplitArrays,
    encode,
    encoded_manifest,
    manifest_digest,
    shard_name,
    table_name,
)
from finetune_trainer.files import TEMPORARY_MARK, publish_directory, remove_tree, sync_directory, temporary_beside, write_durably

COPY_BYTES = 1 << 20
"""Number of bytes that are read and written at a time."""
COUNTS_TYPE = np.dtype([("tokens", "<u4"), ("supervised", "<u4")])
"""Counts of a document, kept until the sequences are planned."""


class Staging:
    """The temporary directory of data in preparation. As a context manager, it removes the data unless it was published."""

    def __init__(self, directory: Path) -> None:
        """directory: the final path. Raises OSError."""
        self._directory = directory
        self._made = [path for path in directory.parents if not path.exists()]
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Only one preflight pod of a job runs at a time, so other temporary directories were left by killed pods.
        for path in directory.parent.glob(f"{directory.name}{TEMPORARY_MARK}*"):
            shutil.rmtree(path, ignore_errors=True)
        self.path = temporary_beside(directory)
        self.path.mkdir()
        self.scratch = self.path / "scratch"
        """Directory of files that are needed only while the data is prepared."""
        self.scratch.mkdir()
        self._splits: dict[str, SplitWriter] = {}

    def split(self, name: str) -> SplitWriter:
        """Return the writer of one split."""
        if name not in self._splits:
            self._splits[name] = SplitWriter(self.path, name, self.scratch)
        return self._splits[name]

    def flush(self) -> None:
        """Make everything written so far readable at `path`. Raises OSError."""
        for split in self._splits.values():
            split.flush()

    def publish(self, facts: Mapping[str, Any]) -> str:
        """Write a manifest that includes `facts` (JSON values), rename the directory, and return the hash. Raises OSError."""
        files: dict[str, dict[str, Any]] = {}
        for split in self._splits.values():
            files |= split.close()
        shutil.rmtree(self.scratch)
        body = {"version": FORMAT_VERSION, "files": files, **facts}
        data_hash = manifest_digest(body)
        write_durably(self.path / MANIFEST_FILE, encoded_manifest({**body, "data_hash": data_hash}))
        remove_tree(self._directory)
        publish_directory(self.path, self._directory)
        return data_hash

    def discard(self) -> None:
        """Remove unpublished data, and the parent directories that were created for it."""
        for split in self._splits.values():
            split.abandon()
        shutil.rmtree(self.path, ignore_errors=True)
        for directory in self._made:
            with suppress(OSError):  # the directory contains something else
                directory.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.discard()


class SplitWriter:
    """Appends to the files of one split."""

    def __init__(self, root: Path, name: str, scratch: Path) -> None:
        self._root, self._name = root, name
        (root / name).mkdir()
        self._tables = {table: _DigestedFile(root / name / table_name(table)) for table in TABLES}
        self._shards: list[_DigestedFile] = []
        self._counts = (scratch / f"{name}-counts").open("w+b")
        self._num_tokens = 0

    def append_documents(self, tokens: BinaryIO, lengths: Array, supervised: Array) -> None:
        """Append whole documents. tokens: file of tokens in the stored form. lengths, supervised: counts for each document."""
        self._append("document_ends", self._num_tokens + np.cumsum(lengths, dtype=np.int64))
        rows = np.empty(len(lengths), dtype=COUNTS_TYPE)
        rows["tokens"], rows["supervised"] = lengths, supervised
        self._counts.write(rows.tobytes())
        left = int(np.sum(lengths, dtype=np.int64)) * TOKEN_TYPE.itemsize
        while left:
            number, within = divmod(self._num_tokens, TOKENS_PER_SHARD)
            if number == len(self._shards):
                self._shards.append(_DigestedFile(self._root / self._name / shard_name(number)))
            block = tokens.read(min(left, COPY_BYTES, (TOKENS_PER_SHARD - within) * TOKEN_TYPE.itemsize))
            if not block:
                raise EOFError(f"{tokens.name} ends {left} bytes early")
            self._shards[number].write(block)
            self._num_tokens += len(block) // TOKEN_TYPE.itemsize
            left -= len(block)

    def counts(self, documents: Array) -> tuple[Array, Array]:
        """Return the number of tokens and of supervised tokens of each document, int64. `documents` must be ascending.

        The counts are read in blocks, since memory-mapped pages would count as resident memory.
        """
        tokens, supervised = np.empty(len(documents), dtype=np.int64), np.empty(len(documents), dtype=np.int64)
        self._counts.flush()
        done = 0
        while done < len(documents):
            first = int(documents[done])
            self._counts.seek(first * COUNTS_TYPE.itemsize)
            rows = np.frombuffer(self._counts.read(COPY_BYTES), dtype=COUNTS_TYPE)
            if not len(rows):
                raise IndexError(f"document {first} is not among those that were appended")
            stop = int(np.searchsorted(documents, first + len(rows)))
            rows_of_documents = rows[documents[done:stop] - first]
            tokens[done:stop], supervised[done:stop] = rows_of_documents["tokens"], rows_of_documents["supervised"]
            done = stop
        return tokens, supervised

    def write_plan(self, windows: Iterable[PlanWindow]) -> PlanCounts:
        """Append all sequences and return their counts. Call this once, after all documents were appended."""
        counts = PlanCounts()
        for window in windows:
            self._append("sequence_documents", window.sequence_documents)
            self._append("sequence_ends", counts.num_occurrences + window.sequence_ends)
            self._append("supervised_tokens", window.supervised_tokens)
            counts.num_occurrences += len(window.sequence_documents)
            counts.num_sequences += len(window.sequence_ends)
            counts.num_tokens += window.num_tokens
            counts.num_supervised_tokens += int(window.supervised_tokens.sum())
        return counts

    def _append(self, table: str, values: Array) -> None:
        self._tables[table].write(np.ascontiguousarray(values, dtype=TABLE_TYPE).data)

    def flush(self) -> None:
        """Write all buffered bytes to the files."""
        for file in (*self._shards, *self._tables.values()):
            file.file.flush()

    def close(self) -> dict[str, dict[str, Any]]:
        """Close all files and make them durable. Returns each file's path below the root -> size and SHA-256."""
        self._counts.close()
        written = [*self._shards, *self._tables.values()]
        entries = {str(file.path.relative_to(self._root)): file.close() for file in written}
        sync_directory(self._root / self._name)
        return entries

    def abandon(self) -> None:
        """Close all files, ignoring errors."""
        for file in (self._counts, *(digested.file for digested in (*self._shards, *self._tables.values()))):
            with suppress(OSError):  # buffered data may not fit on the disk, but is not needed
                file.close()


@dataclass
class PlanCounts:
    """Counts of one pass over a split."""

    num_occurrences: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0


class _DigestedFile:
    """A file whose digest is computed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("wb")
        self._digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        self._digest.update(content)
        self.file.write(content)

    def close(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        size = self.file.tell()
        self.file.close()
        return {"bytes": size, "sha256": self._digest.hexdigest()}


def write_prepared(directory: Path, splits: Mapping[str, SplitArrays], facts: Mapping[str, Any]) -> str:
    """Write splits from memory, and a manifest that includes `facts`, to `directory`. Returns the data hash.

    If this raises OSError, it leaves nothing behind.
    """
    with Staging(directory) as staging:
        for name, arrays in splits.items():
            writer = staging.split(name)
            lengths = np.diff(arrays.document_ends, prepend=0)
            starts = np.concatenate([[0], arrays.document_ends[:-1]])
            supervised = np.add.reduceat(np.asarray(arrays.supervised, dtype=TABLE_TYPE), starts)
            stored = staging.scratch / "tokens"
            stored.write_bytes(encode(arrays.tokens, arrays.supervised).tobytes())
            with stored.open("rb") as tokens:
                writer.append_documents(tokens, lengths, supervised)
            documents, ends = arrays.tables.sequence_documents, np.asarray(arrays.sequence_ends)
            writer.write_plan([PlanWindow.of(documents, ends, lengths, supervised)])
        return staging.publish(facts)

"""Transfers one file from a source to the staging directory, with resuming, retries and verification."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from finetune_trainer.fetch.source import (
    DigestKind,
    RemoteFile,
    RemoteSource,
    SourceUnavailableError,
    WrongBytesError,
    source_unavailable,
)
from finetune_trainer.fetch.staging import FetchedFile, FetchStaging
from finetune_trainer.network.retry import Retries, RetryPolicy, StoppedError, TransientError

SYNC_BYTES = 64 * 1024**2
"""Number of bytes between two fsyncs. A power cut loses at most this much of a file that is being written."""
PROGRESS_BYTES = 1024**2
"""Number of bytes that a failed request must have transferred to count as progress."""
WRONG_BYTES_LIMIT = 3
"""Number of times that a file may arrive complete but with a wrong digest; the last of them ends the fetch."""
_READ_BYTES = 1024**2


def resume_point(length: int, sync_bytes: int) -> int:
    """Return how many bytes of a partial file of this length are certainly on the disk.

    Bytes after a multiple of `sync_bytes` are written only once everything before that multiple is durable. So everything up to
    the last multiple before the end is durable. (If the end itself is a multiple, the fsync there may not have happened.)
    """
    return max(length - 1, 0) // sync_bytes * sync_bytes


class _PartialFile:
    """A partial file that is being written, and the digests of its bytes."""

    def __init__(self, path: Path, file: RemoteFile, sync_bytes: int) -> None:
        self._remote, self._sync_bytes = file, sync_bytes
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._restart_digests()
        self._resume(resume_point(min(path.stat().st_size, file.size), sync_bytes))

    def __enter__(self) -> _PartialFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def _restart_digests(self) -> None:
        self.offset = 0
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(f"blob {self._remote.size}\0".encode(), usedforsecurity=False)
        self._needs_git = self._remote.digest is not None and self._remote.digest.kind is DigestKind.GIT_BLOB

    def _count(self, chunk: bytes | memoryview) -> None:
        self._sha256.update(chunk)
        if self._needs_git:
            self._git.update(chunk)
        self.offset += len(chunk)

    def _resume(self, length: int) -> None:
        while self.offset < length:
            chunk = self._file.read(min(_READ_BYTES, length - self.offset))
            if not chunk:
                break
            self._count(chunk)
        self._file.seek(self.offset)
        self._file.truncate()

    def write(self, chunk: bytes | memoryview) -> None:
        """Append bytes. If the file would exceed the listed size, this drops all bytes and raises TransientError."""
        if self.offset + len(chunk) > self._remote.size:
            self.restart()
            raise TransientError(f"more than the listed {self._remote.size} bytes arrived")
        while len(chunk):
            room = self._sync_bytes - self.offset % self._sync_bytes
            self._file.write(chunk[:room])
            self._count(chunk[:room])
            chunk = chunk[room:]
            if self.offset % self._sync_bytes == 0:
                self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def restart(self) -> None:
        """Drop all bytes."""
        self._restart_digests()
        self._file.seek(0)
        self._file.truncate()

    def seal(self) -> str:
        """Make the bytes durable and return their SHA-256. If the digest is wrong, drops them and raises WrongBytesError."""
        self._sync()
        announced, sha256 = self._remote.digest, self._sha256.hexdigest()
        digest = self._git.hexdigest() if self._needs_git else sha256
        if announced is not None and announced.hexadecimal != digest:
            self.restart()
            message = f"{announced.kind} of the received bytes is {digest}, the source lists {announced.hexadecimal}"
            raise WrongBytesError(message)
        return sha256


@dataclass(frozen=True)
class TransferOptions:
    """The options of a transfer."""

    patience: RetryPolicy
    stop: threading.Event
    """Event that is set when the transfer of another file has failed."""
    received: Callable[[int], None]
    """Function to call with the size in bytes of each piece that arrives."""
    sync_bytes: int = SYNC_BYTES


def fetch_file(remote: RemoteSource, file: RemoteFile, staging: FetchStaging, options: TransferOptions) -> FetchedFile:
    """Fetch one file, unless an earlier attempt has completed it.

    Raises SourceUnavailableError, StoppedError, OSError, and the source's permanent errors.
    """
    complete = staging.complete(file)
    if complete is not None:
        return complete
    attempts, wrong = Retries(file.address, options.patience, options.stop, source_unavailable), 0
    with _PartialFile(staging.partial(file), file, options.sync_bytes) as landing:
        while True:
            before = landing.offset
            try:
                if landing.offset < file.size:
                    _receive(remote, file, landing, options)
                sha256 = landing.seal()
                break
            except WrongBytesError as error:
                wrong += 1
                if wrong == WRONG_BYTES_LIMIT:
                    raise SourceUnavailableError(
                        f"{file.address}: {error}, {wrong} times in a row",
                        "something between the source and this pod changes the bytes, or the source itself is damaged",
                    ) from None
                attempts.failed(error)
            except TransientError as error:
                if landing.offset - before >= PROGRESS_BYTES:
                    attempts.progressed()
                attempts.failed(error)
    return staging.keep(file, sha256)


def _receive(remote: RemoteSource, file: RemoteFile, landing: _PartialFile, options: TransferOptions) -> None:
    chunks = remote.read(file, landing.offset)
    with closing(chunks):  # type: ignore[type-var]
        for chunk in chunks:
            if options.stop.is_set():
                raise StoppedError
            landing.write(chunk)
            options.received(len(chunk))
    if landing.offset < file.size:
        raise TransientError(f"the transfer ended after {landing.offset} of {file.size} bytes")

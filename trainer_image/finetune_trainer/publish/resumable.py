"""Resumable, parallel uploads: a journal of what a destination holds, and a reader that verifies each file before it is sent.

Other pods may write to the workspace, so no link there is followed, and an address in the journal is used only if it belongs to
the registry. Lines of the journal are appended without a sync: a kill loses no line, and what a power cut loses is sent again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import OutsideError, SpecialFileError, read_own
from finetune_trainer.json_lines import read_lines
from finetune_trainer.network.retry import StoppedError
from finetune_trainer.release.files import ReleaseFile

T = TypeVar("T")

BLOCK_BYTES = 1 << 20
"""Number of bytes that are verified, and held in memory, at a time."""


class UploadJournal:
    """A file that maps names to texts; the last text for a name counts. Several threads may use it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, str] = {}
        if os.path.lexists(path):
            try:
                content = read_own(path)
            except SpecialFileError as error:
                raise CheckpointError(f"{path}: {error.strerror}", "delete it and publish again") from error
            entries = read_lines(content.decode(errors="replace"))
            self._known = {str(entry["name"]): str(entry["value"]) for entry in entries if {"name", "value"} <= entry.keys()}

    def recall(self, name: str) -> str | None:
        """Return the last text that was remembered under this name, or None."""
        with self._lock:
            return self._known.get(name) or None

    def remember(self, name: str, value: str) -> None:
        """Remember a text under a name; an empty text removes the name."""
        with self._lock:
            self._known[name] = value
            # Addresses of open uploads may give access to anyone who reads them.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            try:
                # This line must not continue a line that a kill cut off.
                os.write(descriptor, b"\n" + json.dumps({"name": name, "value": value}).encode() + b"\n")
            finally:
                os.close(descriptor)

    def forget(self) -> None:
        """Remove the journal after everything is published."""
        with self._lock:
            self._known.clear()
            self._path.unlink(missing_ok=True)


class ProvenReader(io.BufferedIOBase):
    """A file of a release from which only verified bytes can be read.

    Whoever chose the destination may read everything that arrives there, even from an upload that is never completed. So the
    whole file is hashed first, through the descriptor that is read later, and each block is compared with its hash when read.
    """

    def __init__(self, file: ReleaseFile, stop: threading.Event | None = None) -> None:
        """Open and verify the file. stop: ends this and every read. Raises CheckpointError, StoppedError, OSError."""
        super().__init__()
        self._released, self._stop, self.bytes_read = file, stop, 0
        self._offset, self._blocks, self._held = 0, list[bytes](), (-1, b"")
        try:
            self._file = file.open()
        except (OutsideError, SpecialFileError) as error:
            raise _damaged(file, f"{error.strerror}") from error
        try:
            self._prove()
        except BaseException:
            self._file.close()
            raise

    def _prove(self) -> None:
        digest, remaining = hashlib.sha256(), self._released.size
        while remaining > 0:
            self._check_stop()
            block = self._file.read(min(BLOCK_BYTES, remaining))
            if not block:
                break
            digest.update(block)
            self._blocks.append(hashlib.sha256(block).digest())
            remaining -= len(block)
        if remaining or self._file.read(1):
            raise _damaged(self._released, f"it no longer has {self._released.size} bytes")
        # The actual digest is not shown: it might be the digest of a secret.
        if digest.hexdigest() != self._released.sha256:
            raise _damaged(self._released, f"its sha256 is no longer {self._released.sha256}")

    def _check_stop(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise StoppedError

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next `size` bytes, or fewer at the end. Raises CheckpointError, StoppedError, OSError."""
        self._check_stop()
        end = self._released.size if size is None or size < 0 else min(self._offset + size, self._released.size)
        parts = []
        while self._offset < end:
            number, start = divmod(self._offset, BLOCK_BYTES)
            if self._held[0] != number:
                self._file.seek(number * BLOCK_BYTES)
                block = self._file.read(BLOCK_BYTES)
                if hashlib.sha256(block).digest() != self._blocks[number]:
                    raise _damaged(self._released, "it changed while it was sent")
                self._held = number, block
            part = self._held[1][start : start + end - self._offset]
            parts.append(part)
            self._offset += len(part)
        content = b"".join(parts)
        self.bytes_read += len(content)
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move as io.IOBase.seek does, but never past the end."""
        before = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._released.size}[whence]
        self._offset = min(max(before + offset, 0), self._released.size)
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def upload_all(upload: Callable[[ReleaseFile], T], files: Sequence[ReleaseFile], threads: int, stop: threading.Event) -> list[T]:
    """Upload several files at a time and return the results. The first failure ends the other uploads, and is raised."""
    with ThreadPoolExecutor(threads, thread_name_prefix="upload") as pool:
        futures = [pool.submit(upload, file) for file in files]
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failures = [error for future in finished if (error := future.exception()) is not None]
            if failures:
                raise next((error for error in failures if not isinstance(error, StoppedError)), failures[0])
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def read_proven(file: ReleaseFile) -> bytes:
    """Read and verify all bytes of a small file. Raises OSError, CheckpointError."""
    with ProvenReader(file) as reader:
        return reader.read()


def _damaged(file: ReleaseFile, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file.local}: {why}", "it changed after the merge: delete the directory that holds it and run the merge again"
    )

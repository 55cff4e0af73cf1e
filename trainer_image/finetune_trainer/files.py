"""Durable writes: a name holds either what was there before or the whole of what is new."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

MANIFEST_FILE = "manifest.json"
"""Of a directory of results: its other files with their sizes and SHA-256, and what it was made by. Written last."""
HASHING_THREADS = 2
"""A file each."""
TEMPORARY_MARK = ".tmp-"
"""Part of the name of everything that is not complete yet."""


def temporary_beside(path: Path) -> Path:
    """A new name in the same directory, marked as temporary."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{uuid.uuid4().hex}")


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the file's bytes durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step that survives a power cut. The directory must exist."""
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename a complete directory, whose files are durable, to its final name, which must not exist."""
    sync_directory(temporary)
    temporary.rename(final)
    sync_directory(final.parent)


class SpecialFileError(OSError):
    """A pipe, a socket, a device or a link to itself where a file should be: reading it could block, or never end."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "is a pipe, a socket, a device, a directory or a link to itself, not a file", str(path))


def open_regular(path: Path) -> BufferedReader:
    """Open a file of the user's for reading, without waiting. Raises SpecialFileError, and OSError as the file system does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):
            raise SpecialFileError(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SpecialFileError(path)
    return os.fdopen(descriptor, "rb")


def file_sha256(path: Path) -> str:
    """Digest of the file's bytes, in hexadecimal. Raises SpecialFileError, and OSError as the file system does."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileDigests:
    """SHA-256 of files, some of them at a time, in threads that leave the interpreter to the caller."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(HASHING_THREADS)
        self._digests: dict[Path, Future[str]] = {}

    def begin(self, paths: Iterable[Path]) -> None:
        """Start with what `of` will be asked for. A file that is not known yet is read from now on, not later."""
        for path in paths:
            if path not in self._digests:
                self._digests[path] = self._threads.submit(file_sha256, path)

    def of(self, path: Path) -> str:
        """The digest, once for each path. Raises as `file_sha256` does."""
        self.begin([path])
        return self._digests[path].result()

"""Durable writes: a name holds either what was there before or the whole of what is new. And the names of licence files."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import uuid
from io import BufferedReader
from pathlib import Path

MANIFEST_FILE = "manifest.json"
"""Of a directory of results: its other files with their sizes and SHA-256, and what it was made by. Written last."""
TEMPORARY_MARK = ".tmp-"
"""Part of the name of everything that is not complete yet."""
LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
"""Beginnings of the names of files that are a model's terms, in capitals: they are fetched with it and published with everything
that is made of it."""


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


def licence_files(model: Path) -> list[Path]:
    """The terms in a model's directory."""
    return sorted(path for path in model.iterdir() if path.is_file() and path.name.upper().startswith(LICENCE_NAMES))

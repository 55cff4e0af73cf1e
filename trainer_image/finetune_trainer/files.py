"""Durable writes: a name holds either what was there before or the whole of what is new."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

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


def file_sha256(path: Path) -> str:
    """Digest of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

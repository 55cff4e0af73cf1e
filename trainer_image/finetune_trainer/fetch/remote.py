"""What a source outside the cluster is to the rest: a list of files, and their bytes from any offset on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Protocol


class DigestKind(StrEnum):
    """How a source names the content of a file."""

    SHA256 = "sha256"
    GIT_BLOB = "git-blob"
    """SHA-1 of `blob <size>\\0` and the bytes: the name of a file in git that is not in its large file storage."""


@dataclass(frozen=True)
class Digest:
    """Content as the source names it."""

    kind: DigestKind
    hexadecimal: str


@dataclass(frozen=True)
class RemoteFile:
    """One file of a source, as it was listed."""

    path: str
    """Below the target: relative, with forward slashes."""
    size: int
    """Bytes."""
    version: str
    """Changes whenever the content does: the git object or the ETag."""
    address: str
    """Path in the repository, or key in the bucket."""
    digest: Digest | None = None
    """None where the source tells none."""


class Remote(Protocol):
    """A source. What may pass is raised as TransientError, by both methods; anything else is a TrainerError and final."""

    def files(self) -> list[RemoteFile]:
        """What the source holds, in any order."""
        ...

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes | memoryview]:
        """The bytes of a file from `offset` on, in order; closing the iterator ends the transfer."""
        ...


_MAX_NAME_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


def path_problem(path: str) -> str | None:
    """Why a path of a listing is no path below the target; None for one that is."""
    if not path or path.startswith("/"):
        return "is not relative"
    if _CONTROL.search(path):
        return "holds a control character or a backslash"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "holds an empty, '.' or '..' segment"
    if any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
        return f"holds a name of more than {_MAX_NAME_BYTES} bytes"
    return None


def listing_problem(files: Sequence[RemoteFile]) -> str | None:
    """Why these files cannot lie side by side below one directory; None where they can."""
    paths: set[str] = set()
    for file in files:
        problem = path_problem(file.path)
        if problem is not None:
            return f"{file.path!r} {problem}"
        if file.path in paths:
            return f"{file.path!r} is listed twice"
        paths.add(file.path)
    for path in sorted(paths):
        for parent in PurePosixPath(path).parents:
            if str(parent) in paths:
                return f"{str(parent)!r} is a file and the directory of {path!r}"
    return None

"""Defines a source outside the cluster: its listing, the files that are fetched from it, and its failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Protocol

from finetune_job.failures import FailureClass
from finetune_trainer.companion_files import SETTINGS_SUFFIXES
from finetune_trainer.data.read import KNOWN_EXTENSIONS
from finetune_trainer.errors import TrainerError
from finetune_trainer.files import CODE_SUFFIX, LICENCE_NAMES, OTHER_LAYOUT, TEMPLATES
from finetune_trainer.network.retry import TransientError

MODEL_SUFFIXES = SETTINGS_SUFFIXES | {".safetensors", ".md"}
"""Suffixes of weights, settings, tokenizers, chat templates and the model card. Formats that can contain code are left out."""
_MAX_NAME_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


class DigestKind(StrEnum):
    """The way in which a source identifies the content of a file."""

    SHA256 = "sha256"
    GIT_BLOB = "git-blob"
    r"""SHA-1 of `blob <size>\\0` followed by the bytes: git's object id for a file that is not in large file storage."""


@dataclass(frozen=True)
class Digest:
    """The digest by which the source identifies a file's content."""

    kind: DigestKind
    hexadecimal: str


@dataclass(frozen=True)
class RemoteFile:
    """One file in the listing of a source."""

    path: str
    """Path relative to the target, with forward slashes."""
    size: int
    """Size in bytes."""
    version: str
    """Git object or ETag, which changes with the content."""
    address: str
    """Path in the repository, or key in the bucket."""
    digest: Digest | None = None
    """Digest of the content; None if the source has none."""


class RemoteSource(Protocol):
    """Interface of a source. Both methods raise TransientError for temporary failures, and TrainerError for permanent ones."""

    def files(self) -> list[RemoteFile]:
        """List the files of the source, in any order."""
        ...

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a file from `offset` on, in order. Closing the iterator ends the transfer."""
        ...


def path_problem(path: str) -> str | None:
    """Return the reason why a listed path is not a valid path below the target; None if it is valid."""
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
    """Return the reason why these files cannot be stored in one directory; None if they can."""
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


def model_files(files: Sequence[RemoteFile], *, allow_remote_code: bool) -> list[RemoteFile]:
    """Select the files that a model needs. Leaves out files in subdirectories, except chat templates and, if allowed, code."""
    taken = [file for file in files if _belongs_to_model(PurePosixPath(file.path), allow_remote_code)]
    # Weights in their author's own layout are fetched only if there are no others.
    doubled = {file.path for file in taken if _is_weight(file) and file.path.startswith(OTHER_LAYOUT)}
    has_others = any(_is_weight(file) and file.path not in doubled for file in taken)
    return [file for file in taken if file.path not in doubled] if has_others else taken


def has_weights(files: Sequence[RemoteFile]) -> bool:
    """Whether any of the files holds weights."""
    return any(map(_is_weight, files))


def data_files(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Select the files that can be read as records."""
    return [file for file in files if file.path.lower().endswith(KNOWN_EXTENSIONS) and not _is_hidden(file.path)]


def _belongs_to_model(path: PurePosixPath, allow_remote_code: bool) -> bool:
    if _is_hidden(str(path)):
        return False
    if path.suffix == CODE_SUFFIX:
        return allow_remote_code
    if len(path.parts) > 1:
        return path.parts[0] == TEMPLATES and path.suffix == ".jinja"
    return path.suffix.lower() in MODEL_SUFFIXES or path.name.upper().startswith(LICENCE_NAMES)


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _is_weight(file: RemoteFile) -> bool:
    return file.path.endswith(".safetensors")


class SourceUnavailableError(TrainerError):
    """The source did not answer, or answered with something unexpected."""

    failure = FailureClass.SOURCE_UNAVAILABLE


class NoRoomError(TrainerError):
    """The claim has less free space than the sources need."""

    failure = FailureClass.DISK_FULL


class WrongBytesError(TransientError):
    """A complete file arrived, but its digest differs from the source's listing."""


def source_unavailable(message: str) -> SourceUnavailableError:
    """Return the error that ends a fetch after too many failed requests."""
    return SourceUnavailableError(
        message,
        "another attempt continues where this one stopped; check the network access out of the cluster and the endpoints of the "
        "profile's spec.fetch",
    )

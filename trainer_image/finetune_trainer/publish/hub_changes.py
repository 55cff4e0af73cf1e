"""Changes that a commit to a repository on the Hub must make, and reasons to refuse it.

The repository may hold an older release of this product, which the new one replaces completely: a remaining shard might be loaded
together with shards of another model. Nothing else that loaders would take for a model is ever deleted or left beside the
release: it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from finetune_trainer.publish.resumable import read_proven
from finetune_trainer.release.checksums import parse_checksums
from finetune_trainer.release.files import CHECKSUMS, PROVENANCE, SIGNATURE, Release, ReleaseFile

_LOADABLE_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".pkl", ".index.json"}
)
_LOADABLE_NAMES = frozenset({"config.json", "adapter_config.json", "generation_config.json", "chat_template.jinja"})


@dataclass(frozen=True)
class StoredFile:
    """A file in the repository."""

    path: str
    size: int
    git_blob: str
    sha256: str | None
    """None: it is kept in git, not in large file storage."""


@dataclass(frozen=True)
class CommitChanges:
    """Changes of one commit. Empty: the repository already holds the release."""

    added: tuple[ReleaseFile, ...]
    """Files in the order of the release."""
    deleted: tuple[str, ...]


class ForeignModelError(Exception):
    """The repository holds parts of a model that this run has not put there. The message names the first of them."""


def changes_for(release: Release, stored: Iterable[StoredFile], older_checksums: str | None) -> CommitChanges:
    """Files to add and to delete. older_checksums: content of the repository's SHA256SUMS. Raises ForeignModelError."""
    standing = {file.path: file for file in stored}
    files = (*release.files, release.manifest)
    names = {file.name for file in files}
    older = _older_release(standing, older_checksums)
    foreign = sorted(path for path in standing if path not in older and is_loadable(path) and path not in names)
    if not older:
        # Without an earlier release of this product, files of the same names belong to another model, too.
        foreign += sorted(
            path for path in standing if path in names and is_loadable(path) and not _is_same(standing[path], files)
        )
    if foreign:
        raise ForeignModelError(f"it holds {foreign[0]}{f' and {len(foreign) - 1} more files' if len(foreign) > 1 else ''}")
    added = tuple(file for file in files if not is_stored(file, standing.get(file.name)))
    return CommitChanges(added, tuple(sorted(path for path in older if path not in names)))


def is_loadable(path: str) -> bool:
    """Whether a loader might take the file for a part of a model."""
    name = PurePosixPath(path).name.lower()
    return name in _LOADABLE_NAMES or name.endswith(tuple(_LOADABLE_SUFFIXES))


def is_stored(file: ReleaseFile, stored: StoredFile | None) -> bool:
    """Whether the repository holds exactly this file, which is read if git keeps it. Raises CheckpointError."""
    if stored is None or stored.size != file.size:
        return False
    if stored.sha256 is not None:
        return stored.sha256 == file.sha256
    return stored.git_blob == git_blob(read_proven(file))


def git_blob(content: bytes) -> str:
    """Name of the content in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _is_same(stored: StoredFile, files: Iterable[ReleaseFile]) -> bool:
    return any(file.name == stored.path and is_stored(file, stored) for file in files)


def _older_release(standing: Mapping[str, StoredFile], checksums: str | None) -> set[str]:
    """Files of an older release that are unchanged since then."""
    listed = parse_checksums(checksums) if checksums is not None else None
    if listed is None or PROVENANCE not in listed:
        return set()
    # Weights that were replaced since then do not belong to the release any more.
    ours = {path for path, sha256 in listed.items() if path in standing and standing[path].sha256 in (None, sha256)}
    return ours | {CHECKSUMS} | ({SIGNATURE} & standing.keys())

"""Determines the changes that a commit to a repository on the Hub must make, and the reasons to refuse the repository.

The repository may hold an older release of this product, which the new one replaces completely: a remaining shard might be loaded
together with shards of another model. If the repository holds anything else that loaders would take for a model, it is refused:
such files are neither deleted nor left next to the release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
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
    """Digest of a file in large file storage; None for a file that git itself keeps."""


@dataclass(frozen=True)
class CommitChanges:
    """The changes of one commit; if there are none, the repository already holds the release."""

    added: tuple[ReleaseFile, ...]
    """Files in the order of the release."""
    deleted: tuple[str, ...]


class ForeignModelError(Exception):
    """The repository holds parts of a model that no release of this product put there. The message names the first of them."""


def changes_for(release: Release, stored: Iterable[StoredFile], older_checksums: str | None) -> CommitChanges:
    """Determine which files to add and to delete. older_checksums: the repository's SHA256SUMS. Raises ForeignModelError."""
    present = {file.path: file for file in stored}
    files = (*release.files, release.manifest)
    names = {file.name for file in files}
    listed = parse_checksums(older_checksums) if older_checksums is not None else None
    older: set[str] = set()
    if listed is not None and PROVENANCE in listed:
        # Files that were replaced since then no longer belong to the older release.
        older = {path for path, sha256 in listed.items() if path in present and present[path].sha256 in (None, sha256)}
        older |= {CHECKSUMS} | ({SIGNATURE} & present.keys())
    foreign = sorted(path for path in present if path not in older and is_loadable(path) and path not in names)
    if not older:
        # Without an older release of this product, even files that have the same names as ours belong to another model.
        ours = [file for file in files if file.name in present and is_loadable(file.name)]
        foreign += sorted(file.name for file in ours if not is_stored(file, present[file.name]))
    if foreign:
        raise ForeignModelError(f"it holds {foreign[0]}{f' and {len(foreign) - 1} more files' if len(foreign) > 1 else ''}")
    added = tuple(file for file in files if not is_stored(file, present.get(file.name)))
    return CommitChanges(added, tuple(sorted(path for path in older if path not in names)))


def is_loadable(path: str) -> bool:
    """Whether a loader might take the file for part of a model."""
    name = PurePosixPath(path).name.lower()
    return name in _LOADABLE_NAMES or name.endswith(tuple(_LOADABLE_SUFFIXES))


def is_stored(file: ReleaseFile, stored: StoredFile | None) -> bool:
    """Whether the repository holds exactly this file. Reads the file if only its git digest is known. Raises CheckpointError."""
    if stored is None or stored.size != file.size:
        return False
    if stored.sha256 is not None:
        return stored.sha256 == file.sha256
    # This is the digest that git uses as the content's name.
    content = read_proven(file)
    return stored.git_blob == hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

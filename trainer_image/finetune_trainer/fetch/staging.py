"""Manages the directory in which a source's files are collected, and the manifest by which the copy is verified later.

    <target>.tmp-fetch/files/<path>     complete files
    <target>.tmp-fetch/partial/<key>    partial files; the key is a digest of path and version
    <target>.tmp-fetch/complete.jsonl   a line for each complete file
    <target>.fetched.json               the manifest, written last

The directory survives a killed attempt, so the next attempt continues there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune_job.plan.launch_plan import FetchItem
from finetune_trainer.fetch.source import RemoteFile
from finetune_trainer.files import TEMPORARY_MARK, file_sha256, read_own, sync_directory, write_durably


class FetchedFile(BaseModel):
    """One complete file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    """Path below the target."""
    size: int
    sha256: str
    version: str
    """Git object or ETag at the source."""


class FetchManifest(BaseModel):
    """The files of a source as they were when they were fetched."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: str
    revision: str | None
    files: tuple[FetchedFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def manifest_path(target: Path) -> Path:
    """Path of a target's manifest. It is next to the target, which holds only the source's files."""
    return target.with_name(f"{target.name}.fetched.json")


def write_manifest(target: Path, manifest: FetchManifest) -> None:
    """Replace the manifest of a target."""
    write_durably(manifest_path(target), manifest.model_dump_json(indent=2).encode())


def read_manifest(target: Path) -> FetchManifest | None:
    """Read the manifest of a target; None if it is missing or damaged."""
    try:
        return FetchManifest.model_validate_json(read_own(manifest_path(target)))
    except (OSError, ValidationError):
        return None


def verified_fetch(target: Path, item: FetchItem) -> FetchManifest | None:
    """Return the manifest if the target holds exactly the bytes that were fetched for this item; otherwise None."""
    manifest = read_manifest(target)
    if manifest is None or (manifest.source, manifest.revision) != (item.source, item.revision):
        return None
    paths = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_symlink() or not path.is_dir()}
    if set(paths) != {file.path for file in manifest.files}:
        return None
    for file in manifest.files:
        path = paths[file.path]
        if path.is_symlink() or path.stat().st_size != file.size or file_sha256(path) != file.sha256:
            return None
    return manifest


class FetchStaging:
    """The directory that holds one source's files until all of them are complete."""

    def __init__(self, target: Path) -> None:
        self.root = target.with_name(f"{target.name}{TEMPORARY_MARK}fetch")
        self.files, self._partial, self._journal = self.root / "files", self.root / "partial", self.root / "complete.jsonl"
        self._lock = threading.Lock()
        self._known: dict[str, FetchedFile] = {}

    def open(self, listed: Sequence[RemoteFile]) -> None:
        """Create the directories, read which files earlier attempts completed, and remove what belongs to no listed file."""
        if self.root.is_symlink():
            self.root.unlink()
        for directory in (self.files, self._partial):
            directory.mkdir(parents=True, exist_ok=True)
        self._known = {}
        for line in read_own(self._journal).splitlines() if self._journal.exists() else []:
            with suppress(ValidationError):  # the last line of a killed attempt may be cut off
                file = FetchedFile.model_validate_json(line)
                self._known[file.path] = file
        wanted = {self._journal, *(self.files / file.path for file in listed), *map(self.partial, listed)}
        # Links are also removed, because a write could follow them out of the directory.
        for parent, directories, names in os.walk(self.root, topdown=False):
            for name in (*directories, *names):
                path = Path(parent, name)
                if path.is_symlink() or (not path.is_dir() and path not in wanted):
                    path.unlink()
                elif path.is_dir() and path not in (self.files, self._partial) and not any(path.iterdir()):
                    path.rmdir()

    def held_bytes(self) -> int:
        """Number of bytes of complete and partial files."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def complete(self, file: RemoteFile) -> FetchedFile | None:
        """Return the file that an earlier attempt completed if it is unchanged here and at the source; otherwise None."""
        known, path = self._known.get(file.path), self.files / file.path
        if known is None or (known.version, known.size) != (file.version, file.size) or not path.is_file():
            return None
        return known if path.stat().st_size == known.size and file_sha256(path) == known.sha256 else None

    def partial(self, file: RemoteFile) -> Path:
        """Path of the partial file for this version of the file."""
        return self._partial / hashlib.sha256(f"{file.path}\0{file.version}".encode()).hexdigest()

    def keep(self, file: RemoteFile, sha256: str) -> FetchedFile:
        """Move a partial file, once it is complete and durable, to the complete files."""
        final = self.files / file.path
        final.parent.mkdir(parents=True, exist_ok=True)
        self.partial(file).replace(final)
        fetched = FetchedFile(path=file.path, size=file.size, sha256=sha256, version=file.version)
        with self._lock, self._journal.open("ab") as journal:
            # This line must not continue a line that a kill cut off.
            journal.write(b"\n" + fetched.model_dump_json().encode() + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
        return fetched

    def publish(self, target: Path) -> None:
        """Rename the directory of complete files to the target, which must not exist."""
        for parent, _, _ in os.walk(self.files, topdown=False):
            sync_directory(Path(parent))
        self.files.rename(target)
        sync_directory(target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the staging directory."""
        shutil.rmtree(self.root, ignore_errors=True)

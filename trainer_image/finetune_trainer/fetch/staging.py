"""The directory in which a source is collected: survives a killed attempt, so that the next one goes on from there.

<target>.tmp-fetch/files/<path>      complete files
                   partial/<key>     beginnings of files; the key holds path and version
                   complete.jsonl    a line for each complete file
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer.fetch.manifest import FetchedFile
from finetune_trainer.fetch.remote import RemoteFile
from finetune_trainer.files import TEMPORARY_MARK, file_sha256, sync_directory


class Staging:
    """Where the files of one source are until all are whole."""

    def __init__(self, target: Path) -> None:
        self.root = target.with_name(f"{target.name}{TEMPORARY_MARK}fetch")
        self.files, self._partial, self._journal = self.root / "files", self.root / "partial", self.root / "complete.jsonl"
        self._lock = threading.Lock()
        self._known: dict[str, FetchedFile] = {}

    def open(self, listed: Sequence[RemoteFile]) -> None:
        """Make the directories, read what an earlier attempt completed, and drop what does not belong to the listed files."""
        if self.root.is_symlink():
            self.root.unlink()
        for directory in (self.files, self._partial):
            directory.mkdir(parents=True, exist_ok=True)
        self._known = self._read_journal()
        self._drop_all_but({self.files / file.path for file in listed} | {self.partial(file) for file in listed})

    def _read_journal(self) -> dict[str, FetchedFile]:
        known: dict[str, FetchedFile] = {}
        if self._journal.exists():
            for line in self._journal.read_bytes().splitlines():
                try:
                    file = FetchedFile.model_validate_json(line)
                except ValidationError:  # the last line of an attempt that was killed
                    continue
                known[file.path] = file
        return known

    def _drop_all_but(self, wanted: set[Path]) -> None:
        """Links go, too: a write could leave the directory through them."""
        for parent, directories, names in os.walk(self.root, topdown=False):
            for name in (*directories, *names):
                path = Path(parent, name)
                if path.is_symlink() or (not path.is_dir() and path not in wanted and path != self._journal):
                    path.unlink()
                elif path.is_dir() and path not in (self.files, self._partial) and not any(path.iterdir()):
                    path.rmdir()

    def held_bytes(self) -> int:
        """Bytes of complete files and beginnings."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def complete(self, file: RemoteFile) -> FetchedFile | None:
        """The file as an earlier attempt completed it, if it is still what it was then."""
        known, path = self._known.get(file.path), self.files / file.path
        if known is None or (known.version, known.size) != (file.version, file.size) or not path.is_file():
            return None
        return known if path.stat().st_size == known.size and file_sha256(path) == known.sha256 else None

    def partial(self, file: RemoteFile) -> Path:
        """Where the beginning of this version of the file is."""
        return self._partial / hashlib.sha256(f"{file.path}\0{file.version}".encode()).hexdigest()

    def keep(self, file: RemoteFile, sha256: str) -> FetchedFile:
        """Move a partial file that is whole and durable to its place among the complete ones."""
        final = self.files / file.path
        final.parent.mkdir(parents=True, exist_ok=True)
        self.partial(file).replace(final)
        fetched = FetchedFile(path=file.path, size=file.size, sha256=sha256, version=file.version)
        with self._lock, self._journal.open("ab") as journal:
            # A line that a kill cut off must not swallow this one.
            journal.write(b"\n" + fetched.model_dump_json().encode() + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
        return fetched

    def publish(self, target: Path) -> None:
        """Give the complete files the target's name, which must not exist."""
        for parent, _, _ in os.walk(self.files, topdown=False):
            sync_directory(Path(parent))
        self.files.rename(target)
        sync_directory(target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.root, ignore_errors=True)

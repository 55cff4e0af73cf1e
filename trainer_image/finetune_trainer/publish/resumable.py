"""What makes an upload resumable and right: a journal of what a destination holds already, and a reader that proves each file.

Lines of the journal are appended and not synced: a kill loses none, and what a power cut loses is sent again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from types import TracebackType

from finetune_trainer.errors import CheckpointError
from finetune_trainer.release.files import ReleaseFile


class UploadJournal:
    """Texts by name; the last one counts. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, str] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    entry = json.loads(line)
                    self._known[str(entry["name"])] = str(entry["value"])
                except (ValueError, KeyError, TypeError):  # the last line of an attempt that was killed
                    continue

    def recall(self, name: str) -> str | None:
        """What was remembered last; None: nothing."""
        with self._lock:
            return self._known.get(name) or None

    def remember(self, name: str, value: str) -> None:
        """Keep it; an empty text is nothing."""
        with self._lock:
            self._known[name] = value
            # Addresses of open uploads may open them to anyone who reads them.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                # A line that a kill cut off must not swallow this one.
                os.write(descriptor, b"\n" + json.dumps({"name": name, "value": value}).encode() + b"\n")
            finally:
                os.close(descriptor)

    def forget(self) -> None:
        """Everything is published."""
        with self._lock:
            self._known.clear()
            self._path.unlink(missing_ok=True)


class VerifyingReader:
    """A file of a release, read from its beginning to its end."""

    def __init__(self, file: ReleaseFile) -> None:
        self._released, self._digest, self.offset = file, hashlib.sha256(), 0
        self._file = file.local.open("rb")

    def __enter__(self) -> VerifyingReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """The next bytes: `size` of them, fewer only at the end. Raises OSError, CheckpointError."""
        content = self._file.read(size)
        self._digest.update(content)
        self.offset += len(content)
        if len(content) < size and self.offset < self._released.size:
            raise _damaged(self._released, f"it has only {self.offset} of {self._released.size} bytes")
        return content

    def skip_to(self, offset: int) -> None:
        """Read and hash what need not be sent again."""
        while self.offset < offset:
            self.read(min(1024**2, offset - self.offset))

    def prove(self) -> None:
        """The bytes were those of the release. Raises CheckpointError. Call it before anything makes them visible."""
        found = self._digest.hexdigest()
        if self.offset != self._released.size or self._file.read(1):
            raise _damaged(self._released, f"it does not have the {self._released.size} bytes that it had")
        if found != self._released.sha256:
            raise _damaged(self._released, f"its sha256 is {found}, and {self._released.sha256} was to be published")


def read_verified(file: ReleaseFile) -> bytes:
    """All bytes of a small file, proven. Raises OSError, CheckpointError."""
    with VerifyingReader(file) as reader:
        content = reader.read(file.size)
        reader.prove()
    return content


def _damaged(file: ReleaseFile, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file.local}: {why}", "it changed after the merge: delete the directory that holds it and run the merge again"
    )

"""Records the durable bytes of an unfinished output in an append-only file next to it, which also serves as the output's lock.

A line has a checksum, a space and a record as JSON. The first record names the plan and the inputs. Every other record names a
file, a number of bytes and their sha256, and is written after that file is synced. So every readable line is true, no matter when
the process or the machine stopped. An incomplete last line is ignored. writer.py opens the journal, and stream.py adds records.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.files import read_own
from finetune_trainer.weights.errors import OutputBusyError
from finetune_trainer.weights.storage import translate_os_errors, write_all

log = logging.getLogger(__name__)
JOURNAL_FORMAT = 1
_CHECKSUM_CHARACTERS = 16
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Durable:
    """A durable part of a file: its first `num_bytes`, header included, and their sha256."""

    num_bytes: int
    sha256: str


class Journal:
    """The journal of one output, locked while it is open. Several threads may append to it.

    Raises OutputBusyError if another process holds the lock, and StorageError if the disk fails.
    """

    def __init__(self, path: Path, plan_sha256: str, inputs: Mapping[str, Any]) -> None:
        self.path = path
        self._descriptor = _lock(path)
        self._appending = threading.Lock()
        head = {"format": JOURNAL_FORMAT, "plan_sha256": plan_sha256, "inputs": dict(inputs)}
        try:
            with translate_os_errors(path, "read"):
                records, num_bytes = _read_records(path)
            self.is_continued = bool(records) and records[0] == head
            """Whether an earlier merge with the same plan and inputs has already begun this output."""
            self.durable: dict[str, Durable] = {}
            """The part of each file that was durable when the journal was opened, by file name."""
            if self.is_continued:
                for record in records[1:]:
                    self.durable[record["file"]] = Durable(record["num_bytes"], record["sha256"])
            with translate_os_errors(path, "written"):
                os.ftruncate(self._descriptor, num_bytes if self.is_continued else 0)
                self._position = num_bytes if self.is_continued else 0
            if not self.is_continued:
                self._append(head)
            self.has_records = bool(self.durable)
        except BaseException:
            self.close()
            raise

    def record(self, file_name: str, durable: Durable) -> None:
        """Record a part of a file that the caller has just synced."""
        with self._appending:
            self._append({"file": file_name, "num_bytes": durable.num_bytes, "sha256": durable.sha256})
            self.has_records = True

    def remove(self) -> None:
        """Delete the journal, then release the lock. Call this once the recorded files are renamed into place or deleted."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        line = _checksum(text) + b" " + text + b"\n"
        with translate_os_errors(self.path, "written"):
            write_all(self._descriptor, memoryview(line), self._position)
            os.fsync(self._descriptor)
        self._position += len(line)


def _lock(path: Path) -> int:
    """Open or create the file at `path`, and lock it. Return its descriptor."""
    while True:
        with translate_os_errors(path, "written"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise OutputBusyError(
                f"{path}: another merge into the same output holds the lock. Wait until it ends, or choose another output."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            log.warning("%s: this file system has no locks; do not start another merge into the same output meanwhile", path)
            return descriptor
        # If the previous holder deleted the file after it was opened here, no other process would see this lock.
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_CHECKSUM_CHARACTERS].encode()


def _read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records before the first damaged one, and the number of their bytes."""
    records: list[dict[str, Any]] = []
    num_bytes = 0
    for line in read_own(path).splitlines(keepends=True):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or _checksum(text) != checksum:
            break
        records.append(json.loads(text))
        num_bytes += len(line)
    return records, num_bytes

"""The durable part of an unfinished output: an append-only file beside the output, which is also the output's lock.

One line per record: a checksum, a space, JSON. The first names the plan and the inputs; every other one a file, a number of bytes
and their sha256, and is written only after a sync of that file. So a readable line is true of the disk, whenever the process or
the machine stopped; a torn last line is ignored. Called by writer.py; journal_writer.py makes the records.
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
    """The first `num_bytes` of a file, header included, are on disk and have this sha256."""

    num_bytes: int
    sha256: str


class Journal:
    """The journal of one output, locked while it is open. Several threads may append to it.

    Raises OutputBusyError when another process holds it, StorageError when the disk fails.
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
            """Whether the output beside it belongs to this merge, which was begun before."""
            self.durable: dict[str, Durable] = {}
            """Durable parts by file name, when the journal was opened."""
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
        """Record what the caller has just synced."""
        with self._appending:
            self._append({"file": file_name, "num_bytes": durable.num_bytes, "sha256": durable.sha256})
            self.has_records = True

    def remove(self) -> None:
        """Delete the file, then release the lock: the recorded files have their final names, or are gone."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, record: Mapping[str, Any]) -> None:
        line = _journal_line(record)
        with translate_os_errors(self.path, "written"):
            write_all(self._descriptor, memoryview(line), self._position)
            os.fsync(self._descriptor)
        self._position += len(line)


def _lock(path: Path) -> int:
    """Open or create the file at `path` and lock it; returns its descriptor."""
    while True:
        with translate_os_errors(path, "written"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise OutputBusyError(
                f"{path}: another merge into the same output holds it. Wait for that one to end, or choose another output."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            log.warning("%s: this file system has no locks; nothing else may merge into the same output meanwhile", path)
            return descriptor
        # The previous holder may have deleted the file after it was opened here; then no other process would see this lock.
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _journal_line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()[:_CHECKSUM_CHARACTERS].encode() + b" " + text + b"\n"


def _read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records before the first damaged one, and their bytes."""
    records: list[dict[str, Any]] = []
    num_bytes = 0
    for line in read_own(path).splitlines(keepends=True):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or hashlib.sha256(text).hexdigest()[:_CHECKSUM_CHARACTERS].encode() != checksum:
            break
        records.append(json.loads(text))
        num_bytes += len(line)
    return records, num_bytes

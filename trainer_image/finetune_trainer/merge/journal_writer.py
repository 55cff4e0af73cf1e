"""Makes written parts of shards durable and records them in the journal, while other threads write. Called by stream.py."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from finetune_trainer.merge.journal import Durable, Journal
from finetune_trainer.merge.shard_file import ShardFile

JOURNAL_BYTES = 1 << 30
"""Bytes of a shard that are synced and recorded at once, at the end of a matrix. A kill costs at most that and one matrix per
shard.
"""


class JournalWriter:
    """Syncs shards and records durable parts in the journal, in a thread of its own, in the order of `note`.

    Several threads may use it, one for each file.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()
        self._noted: dict[str, int] = {}

    def wants(self, file: ShardFile, num_bytes: int) -> bool:
        """Whether the file's first `num_bytes`, at the end of a matrix, are worth a record. If so, the caller calls `note`."""
        with self._lock:
            self._raise_failures(wait=False)
            since = num_bytes - self._noted.setdefault(file.path.name, file.num_done)
            if num_bytes < file.num_bytes and (self._pending or since < JOURNAL_BYTES):
                return False
            self._noted[file.path.name] = num_bytes
            return True

    def note(self, file: ShardFile, written: Durable) -> None:
        """Sync the file's first bytes, which are written, and record them."""
        with self._lock:
            self._pending.append(self._thread.submit(self._sync, file, written))

    def wait(self) -> None:
        """Wait until everything is durable. Raises StorageError."""
        self._raise_failures(wait=True)

    def close(self) -> None:
        """Finish pending records, also after a failure."""
        self._thread.shutdown(wait=True)

    def _sync(self, file: ShardFile, durable: Durable) -> None:
        file.sync()
        self._journal.record(file.path.name, durable)

    def _raise_failures(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].done()):
            self._pending.popleft().result()

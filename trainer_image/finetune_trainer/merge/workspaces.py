"""The memory of a merge: a fixed number of buffers, which chunks wait for. Made and shared among threads by stream.py."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from finetune_trainer.merge.chunks import CHUNK_BYTES


class Workspace:
    """Page-aligned bytes for the input and output of one chunk."""

    def __init__(self) -> None:
        self.data = mmap.mmap(-1, 2 * CHUNK_BYTES)

    def grow(self, num_bytes: int) -> None:
        """Replaces the bytes by at least so many. No view of the old ones may be in use."""
        if len(self.data) < num_bytes:
            self.data.close()
            self.data = mmap.mmap(-1, num_bytes)


class Workspaces:
    """Those that no chunk is in, for several threads. Raises OtherShardFailedError in all of them after `stop`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = deque(Workspace() for _ in range(count))
        self._changed = threading.Condition()
        self._is_reserved = self._is_stopped = False
        self._alone = threading.Lock()

    def take(self, *, wait: bool) -> Workspace | None:
        """One, or None if there is none and the caller does not wait."""
        with self._changed:
            while (self._is_reserved or not self._free) and wait and not self._is_stopped:
                self._changed.wait()
            if self._is_stopped:
                raise OtherShardFailedError
            return self._free.popleft() if self._free and not self._is_reserved else None

    def give(self, workspace: Workspace) -> None:
        with self._changed:
            self._free.append(workspace)
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[Workspace]:
        """One, once the other threads have given theirs back, while they get none. The caller has none and gives it back."""
        with self._alone:
            with self._changed:
                self._is_reserved = True
                while len(self._free) < self._count and not self._is_stopped:
                    self._changed.wait()
                if self._is_stopped:
                    raise OtherShardFailedError
                workspace = self._free.popleft()
            yield workspace
            with self._changed:
                self._is_reserved = False
                self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


class OtherShardFailedError(Exception):
    """Another shard has failed."""

"""Bounds a merge's memory with a fixed number of buffers, for which chunks have to wait. stream.py shares them among threads."""

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
        """Make the buffer at least this large. Its content is lost, and no view of it may be in use."""
        if len(self.data) < num_bytes:
            self.data.close()
            self.data = mmap.mmap(-1, num_bytes)


class Workspaces:
    """The free workspaces, which several threads share. After `stop`, all methods that wait raise OtherShardFailedError."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = deque(Workspace() for _ in range(count))
        self._changed = threading.Condition()
        self._is_reserved = self._is_stopped = False
        self._alone = threading.Lock()

    def take(self, *, wait: bool) -> Workspace | None:
        """Take a free workspace. Return None if there is none and `wait` is False."""
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
        """Wait until all workspaces are free, then yield one while other threads get none. The caller has to give it back."""
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
    """Another shard has failed, so this one is not continued."""

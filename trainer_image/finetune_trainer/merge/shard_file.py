"""One shard file that is written in place, in any order, from several threads. Made by writer.py, filled by stream.py.

Whole pages go to the disk directly, past the page cache: making cache pages took more processor time than the merge's
arithmetic, and swung between 0.4 and 5 s for 2 GB (ext4 on a virtual disk), where direct writes took 0.7 to 0.9 s. A
piece's first and last bytes that fill no page go through the cache. Where a file system refuses direct writes, all do.
"""

import errno
import os
from pathlib import Path

from finetune_trainer.merge.errors import MergeError

PAGE_BYTES = 4096
"""Position, length and address of a direct write are multiples of this; disks ask for 512 or 4096."""


_REFUSED_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class ShardFile:
    """A new file of a known size. Raises MergeError when there is no space for it, now or while it is filled.

    The size is set and free space is checked, but blocks are not allocated ahead: where a file system cannot (NFS before
    4.2), the C library would write the whole file once more.
    """

    def __init__(self, path: Path, num_bytes: int, header: bytes) -> None:
        self.path = path
        self._num_bytes = num_bytes
        self._direct: int | None = None
        self._is_direct = True
        file_system = os.statvfs(path.parent)
        if num_bytes > file_system.f_bavail * file_system.f_frsize:
            raise self._no_space()
        self._cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.ftruncate(self._cached, num_bytes)
            os.pwrite(self._cached, header, 0)
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED_DIRECT:
                os.close(self._cached)
            if error.errno in _NO_SPACE:
                raise self._no_space() from error
            if error.errno not in _REFUSED_DIRECT:
                raise

    def write(self, data: memoryview, position: int) -> None:
        """Writes all of `data`. For direct writes its address must agree with `position` modulo PAGE_BYTES."""
        try:
            if not self._write_directly(data, position):
                _write(self._cached, data, position)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise self._no_space() from error
            raise

    def _write_directly(self, data: memoryview, position: int) -> bool:
        """False when nothing was written because the file system wants no direct writes or no page is full."""
        first = -position % PAGE_BYTES
        last = first + max(0, len(data) - first) // PAGE_BYTES * PAGE_BYTES
        if self._direct is None or not self._is_direct or last <= first:
            return False
        try:
            _write(self._direct, data[first:last], position + first)
        except OSError as error:
            if error.errno not in _REFUSED_DIRECT:
                raise
            self._is_direct = False  # the descriptor stays open: other threads may be using it
            return False
        _write(self._cached, data[:first], position)
        _write(self._cached, data[last:], position + last)
        return True

    def _no_space(self) -> MergeError:
        return MergeError(
            f"{self.path}: no space for {self._num_bytes} bytes. The merged model needs as much space as the base model, or "
            "what its dtype takes; enlarge the workspace."
        )

    def close(self) -> None:
        """Makes the content durable and closes the file. Raises OSError when the disk has failed."""
        try:
            os.fsync(self._cached)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file without waiting for the disk."""
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def _write(descriptor: int, data: memoryview, position: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], position + written)

"""Writes one shard file from beginning to end. writer.py creates the file, and stream.py fills it.

Whole pages are written directly, without the page cache: for 2 GB (ext4 on a virtual disk), direct writes took 0.7 to 0.9 s, and
cached ones 0.4 to 5 s and more processor time than the merge's arithmetic. The bytes after the last whole page are kept until
more follow: a cached write after each chunk would wait for all direct writes to end, which took a tenth of a merge's time. If a
file system refuses direct writes, all writes are cached.

Unchanged bytes are also read and written directly, which took 0.06 s of processor time for 272 MB on that disk.
copy_file_range(2) took 0.13 s, because it fills the page cache, and the bytes still have to be read for the hash.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.files import remove_tree
from finetune_trainer.merge.journal import Durable
from finetune_trainer.weights.storage import read_some, translate_os_errors, write_all

if TYPE_CHECKING:
    from hashlib import _Hash

PAGE_BYTES = 4096
"""Position, length and address of a direct write are multiples of this number. Disks require 512 or 4096."""
READ_BYTES = 4 << 20

_REFUSED_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class ShardFile:
    """A file of a known size, new or begun earlier. Raises StorageError or NoSpaceError if it cannot be created or written.

    `digest` is the sha256 of the first `num_done` bytes: the header, or what an earlier merge made durable. Blocks are not
    allocated in advance, because where a file system cannot do this (NFS before 4.2), the C library writes the whole file.
    """

    def __init__(self, path: Path, num_bytes: int, header: bytes, durable: Durable | None = None) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.digest, self.num_done, self.is_resumed = hashlib.sha256(header), len(header), False
        self._direct: int | None = None
        proven = None if durable is None else _proven(path, num_bytes, durable)
        if durable is not None and proven is not None:
            self.digest, self.num_done, self.is_resumed = proven, durable.num_bytes, True
        else:
            remove_tree(path)
        with translate_os_errors(path, "written"):
            self._cached = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if proven is None:
                    os.ftruncate(self._cached, num_bytes)
                    write_all(self._cached, memoryview(header), 0)
                self._end = self.num_done
                self._tail = os.pread(self._cached, self.num_done % PAGE_BYTES, self.num_done // PAGE_BYTES * PAGE_BYTES)
                try:
                    self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in _REFUSED_DIRECT:
                        raise
            except BaseException:
                os.close(self._cached)
                raise

    def append(self, pages: memoryview, position: int) -> None:
        """Append data at `position`, where the last append ended. Only whole pages are written; `sync` writes the rest.

        pages: a writable buffer with position % PAGE_BYTES bytes of any content, then the data. For a direct write, its address
        has to be a multiple of PAGE_BYTES.
        """
        if position != self._end:
            raise ValueError(f"{self.path}: append at {position}, but the last one ended at {self._end}")
        first = position - len(self._tail)
        pages[: len(self._tail)] = self._tail
        end = len(pages) // PAGE_BYTES * PAGE_BYTES
        with translate_os_errors(self.path, "written"):
            if end and not self._write_directly(pages[:end], first):
                write_all(self._cached, pages[:end], first)
        self._tail, self._end = bytes(pages[end:]), first + len(pages)

    def _write_directly(self, pages: memoryview, position: int) -> bool:
        """Write directly. Return False if nothing was written because the file system refuses direct writes."""
        if self._direct is None:
            return False
        try:
            write_all(self._direct, pages, position)
        except OSError as error:
            if error.errno not in _REFUSED_DIRECT:
                raise
            os.close(self._direct)
            self._direct = None
            return False
        return True

    def sync(self) -> None:
        """Write the bytes after the last whole page, and make all bytes durable. After an error, nothing more can be appended."""
        # If this sync fails, a later one could succeed although bytes are lost, so appending is blocked until this one succeeds.
        end, self._end = self._end, -1
        with translate_os_errors(self.path, "written"):
            write_all(self._cached, memoryview(self._tail), end - len(self._tail))
        with translate_os_errors(self.path, "made durable"):
            os.fsync(self._cached)
        self._end = end

    def close(self) -> None:
        """Close the file without waiting for the disk."""
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def _proven(path: Path, num_bytes: int, durable: Durable) -> _Hash | None:
    """Read the durable bytes, and return their hash; None if the file differs from the journal."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size != num_bytes:
        return None
    digest, position = hashlib.sha256(), 0
    buffer = memoryview(bytearray(READ_BYTES))
    with translate_os_errors(path, "read"), path.open("rb") as file:
        while position < durable.num_bytes:
            count = min(READ_BYTES, durable.num_bytes - position)
            if read_some(file.fileno(), buffer[:count], position) < count:
                return None
            digest.update(buffer[:count])
            position += count
    return digest if digest.hexdigest() == durable.sha256 else None

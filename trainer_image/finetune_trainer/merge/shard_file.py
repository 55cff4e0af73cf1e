"""One shard file that is written from its beginning to its end. writer.py creates it, stream.py fills it.

Whole pages are written directly, past the page cache: making cache pages took more processor time than the merge's arithmetic,
and varied between 0.4 and 5 s for 2 GB (ext4 on a virtual disk), where direct writes took 0.7 to 0.9 s. The bytes after the last
whole page wait for those that follow. They must not go through the cache at each chunk: such a write waits until no direct one is
under way, which took a tenth of a merge's time. If a file system refuses direct writes, all go through the cache.

Unchanged bytes go the same way. copy_file_range(2) makes cache pages as well, and the hash has to read the bytes: for 272 MB on
that disk this took 0.13 s of processor time, where reading and writing directly took 0.06 s. The base's digest of a file would
replace the hash only for a shard with exactly the base's tensors and header; LoRA usually changes some in each.
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
"""Position, length and address of a direct write are multiples of this; disks ask for 512 or 4096."""
READ_BYTES = 4 << 20

_REFUSED_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class ShardFile:
    """A file of a known size, new or begun before. Raises StorageError, also NoSpaceError, when it cannot be created or written.

    `digest` is the sha256 of the first `num_done` bytes, which were durable before; at least the header. Blocks are not allocated
    ahead: if a file system cannot (NFS before 4.2), the C library would write the whole file once more.
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
                self._direct = _open_direct(path)
            except BaseException:
                os.close(self._cached)
                raise

    def append(self, pages: memoryview, position: int) -> None:
        """Write what follows at `position`, where the last append ended. Only whole pages are written; `flush` writes the rest.

        pages: writable; position % PAGE_BYTES bytes of any content, then the data. A direct write needs its address to be a
        multiple of PAGE_BYTES.
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

    def flush(self) -> None:
        """Write the bytes after the last whole page, too."""
        with translate_os_errors(self.path, "written"):
            write_all(self._cached, memoryview(self._tail), self._end - len(self._tail))

    def _write_directly(self, pages: memoryview, position: int) -> bool:
        """Write directly; returns False if nothing was written because the file system refuses direct writes."""
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
        """Make everything that was written durable."""
        with translate_os_errors(self.path, "made durable"):
            os.fsync(self._cached)

    def close(self) -> None:
        """Close the file without waiting for the disk."""
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno in _REFUSED_DIRECT:
            return None
        raise


def _proven(path: Path, num_bytes: int, durable: Durable) -> _Hash | None:
    """The hash of the durable bytes, read again; None if the file differs from the journal."""
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

"""A shard file is written in place, and bytes of an earlier merge are kept only if their hash is right."""

import errno
import hashlib
import itertools
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.merge.journal import Durable
from finetune_trainer.merge.shard_file import PAGE_BYTES, ShardFile
from finetune_trainer.weights.errors import StorageError

HEADER = b"head"
CONTENT = HEADER + bytes(range(256)) * 40
"""This content has more than two pages."""


def append(file: ShardFile, first: int, last: int) -> None:
    """Append CONTENT[first:last], aligned as in the merge's workspaces."""
    lead = first % PAGE_BYTES
    pages = memoryview(mmap.mmap(-1, lead + last - first))
    pages[lead:] = CONTENT[first:last]
    file.append(pages, first)


def refuse_direct_writes(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Refuse direct writes when a file is opened, as tmpfs did, or only at a write."""
    pwrite, open_file = os.pwrite, os.open
    direct: set[int] = set()

    def opened(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and at == "open":
            raise OSError(errno.EINVAL, "no direct writes")
        descriptor = open_file(path, flags, *mode)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def written(descriptor: int, *given: Any) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "no direct writes")
        return pwrite(descriptor, *given)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)


@pytest.mark.parametrize("refused", ["never", "open", "write"])
@pytest.mark.parametrize("ends", [(len(CONTENT),), (7, 5000, 5001, 8192, len(CONTENT)), (4096, 8191, len(CONTENT))])
def test_what_is_appended_gives_the_file(
    tmp_path: Path, ends: tuple[int, ...], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shard"
    if refused != "never":
        refuse_direct_writes(monkeypatch, refused)
    file = ShardFile(path, len(CONTENT), HEADER)
    assert (file.num_done, file.is_resumed) == (len(HEADER), False)
    for first, last in itertools.pairwise([len(HEADER), *ends]):
        append(file, first, last)
        assert path.read_bytes()[: last // PAGE_BYTES * PAGE_BYTES] == CONTENT[: last // PAGE_BYTES * PAGE_BYTES]
        file.sync()
        assert path.read_bytes()[:last] == CONTENT[:last]
    file.close()
    assert path.read_bytes() == CONTENT


def test_bytes_after_the_last_page_wait_for_those_that_follow(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    file = ShardFile(path, len(CONTENT), HEADER)
    append(file, len(HEADER), 5000)
    assert path.read_bytes()[4096:5000] == bytes(904)
    with pytest.raises(ValueError, match="append at 5001, but the last one ended at 5000"):
        append(file, 5001, 6000)
    append(file, 5000, len(CONTENT))
    file.sync()
    file.close()
    assert path.read_bytes() == CONTENT


def test_bytes_of_an_earlier_merge_are_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(CONTENT)
    file = ShardFile(path, len(CONTENT), HEADER, Durable(5000, hashlib.sha256(CONTENT[:5000]).hexdigest()))
    assert (file.num_done, file.is_resumed) == (5000, True)
    file.digest.update(CONTENT[5000:])
    assert file.digest.hexdigest() == hashlib.sha256(CONTENT).hexdigest()
    os.truncate(path, 4096)  # what follows is written with the bytes that were read again
    append(file, 5000, len(CONTENT))
    file.sync()
    assert path.read_bytes() == CONTENT
    file.close()


@pytest.mark.parametrize("harm", ["changed", "cut", "linked"])
def test_other_bytes_than_the_journal_says_are_made_again(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "shard"
    durable = Durable(5000, hashlib.sha256(CONTENT[:5000]).hexdigest())
    if harm == "linked":
        (tmp_path / "elsewhere").write_bytes(CONTENT)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(CONTENT[:-1] if harm == "cut" else CONTENT[:100] + b"?" + CONTENT[101:])
    file = ShardFile(path, len(CONTENT), HEADER, durable)
    file.close()
    assert (file.num_done, file.is_resumed) == (len(HEADER), False)
    assert path.read_bytes() == HEADER + bytes(len(CONTENT) - len(HEADER))
    assert not path.is_symlink()


def test_after_a_failed_sync_nothing_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of later bytes would also cover those that the failed sync may have lost."""
    file = ShardFile(tmp_path / "shard", len(CONTENT), HEADER)
    append(file, len(HEADER), 5000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "lost")))
        with pytest.raises(StorageError, match="lost"):
            file.sync()
    with pytest.raises(ValueError, match="the last one ended at"):
        append(file, 5000, len(CONTENT))
    file.close()

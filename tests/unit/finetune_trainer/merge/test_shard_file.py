"""A shard file is written in place, in any order, and what an earlier merge wrote is taken up only if its hash is right."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from finetune_trainer.merge.journal import Durable
from finetune_trainer.merge.shard_file import PAGE_BYTES, ShardFile

HEADER = b"head"
CONTENT = HEADER + bytes(range(256)) * 40
"""More than two pages."""


def test_chunks_in_any_order_give_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    file = ShardFile(path, len(CONTENT), HEADER)
    assert (file.num_done, file.is_resumed) == (len(HEADER), False)
    file.write(memoryview(bytearray(CONTENT[PAGE_BYTES + 7 :])), PAGE_BYTES + 7)
    file.write(memoryview(bytearray(CONTENT[len(HEADER) : PAGE_BYTES + 7])), len(HEADER))
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

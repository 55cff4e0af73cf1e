"""What publishing remembers between two attempts, and that it sends only what was released."""

import hashlib
import os
import threading

import pytest

from finetune_trainer.errors import CheckpointError
from finetune_trainer.network.retry import StoppedError
from finetune_trainer.publish import resumable
from finetune_trainer.publish.resumable import ProvenReader, UploadJournal, read_proven
from finetune_trainer.release.checksums import read_release
from tests.support.finished_run import finished_run


def test_the_journal_survives_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = UploadJournal(path)
    journal.remember("a", "1")
    journal.remember("a", "2")
    with path.open("ab") as file:
        file.write(b'{"name": "b", "val')
    journal.remember("c", "3")
    journal.remember("d", "4")
    journal.remember("d", "")
    again = UploadJournal(path)
    assert [again.recall(name) for name in "abcd"] == ["2", None, "3", None]
    assert path.stat().st_mode & 0o777 == 0o600
    again.forget()
    assert not path.exists()


def test_a_file_is_read_only_as_it_was_released(tmp_path):
    [*_, file] = read_release(finished_run(tmp_path, "s3://bucket/x")).files
    content = file.local.read_bytes()
    assert read_proven(file) == content
    with ProvenReader(file) as reader:
        reader.seek(3)
        assert reader.read(4) == content[3:7]
        assert reader.read() == content[7:]
        assert reader.read(1) == b""
        assert reader.seek(-2, os.SEEK_END) == len(content) - 2
        assert (reader.read(), reader.tell(), reader.bytes_read) == (content[-2:], len(content), len(content) - 1)
    for other, why in ((content[:-1], "bytes"), (content + b"x", "bytes"), (content[:-1] + b"?", "sha256")):
        file.local.write_bytes(other)
        with pytest.raises(CheckpointError, match=why) as caught:
            read_proven(file)
        assert hashlib.sha256(other).hexdigest() not in f"{caught.value}{caught.value.hint}"


def test_nothing_is_read_that_was_not_proven_first(tmp_path, monkeypatch):
    """Not only that the end is noticed: the bytes that changed are not handed out at all."""
    monkeypatch.setattr(resumable, "BLOCK_BYTES", 10_000)
    context = finished_run(tmp_path, "s3://bucket/x", weight_bytes=(50_000, 3000))
    file = next(file for file in read_release(context).files if file.size == 50_000)
    content = file.local.read_bytes()
    with ProvenReader(file) as reader:
        assert reader.read(15_000) == content[:15_000]
        file.local.write_bytes(content[:40_000] + b"another text" + content[40_012:])
        assert reader.read(10_000) == content[15_000:25_000]
        reader.seek(35_000)
        with pytest.raises(CheckpointError, match="changed while it was sent"):
            reader.read(10_000)


def test_a_stop_ends_the_proof(tmp_path):
    [*_, file] = read_release(finished_run(tmp_path, "s3://bucket/x")).files
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        ProvenReader(file, stop)

"""What publishing remembers between two attempts, and that it sends only what was released."""

from __future__ import annotations

import pytest

from finetune_trainer.errors import CheckpointError
from finetune_trainer.publish.resumable import UploadJournal, VerifyingReader, read_verified
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


def test_a_file_is_sent_only_as_it_was_released(tmp_path):
    [*_, file] = read_release(finished_run(tmp_path, "s3://bucket/x")).files
    content = file.local.read_bytes()
    assert read_verified(file) == content
    with VerifyingReader(file) as reader:
        reader.skip_to(3)
        assert reader.read(len(content)) == content[3:]
        reader.prove()
    for other, why in ((content[:-1], "bytes"), (content + b"x", "bytes"), (content[:-1] + b"?", "sha256")):
        file.local.write_bytes(other)
        with pytest.raises(CheckpointError, match=why):
            read_verified(file)

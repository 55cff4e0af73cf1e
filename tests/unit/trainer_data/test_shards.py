"""Prepared data is whole or not there: every truncation and every flipped byte is refused, and no crash leaves half of it."""

import shutil

import numpy as np
import pytest

from finetune_job.failures import FailureClass
from finetune_trainer.data import shards
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.data.shards import TRAIN, VALIDATION, PreparedDataError, SplitArrays, write_prepared
from finetune_trainer.errors import classify


def arrays(num_tokens=5):
    return SplitArrays(
        tokens=np.arange(1, num_tokens + 1),
        supervised=np.arange(num_tokens) > 0,
        document_ends=np.array([2, num_tokens]),
        sequence_ends=np.array([2]),
        supervised_tokens=np.array([num_tokens - 1]),
    )


def written(tmp_path, num_tokens=5):
    directory = tmp_path / "prepared"
    data_hash = write_prepared(
        directory, {TRAIN: arrays(num_tokens), VALIDATION: arrays()}, {"pad_token_id": 0, "splits": {TRAIN: {}, VALIDATION: {}}}
    )
    return directory, data_hash


def all_files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_what_was_written_is_read(tmp_path):
    directory, data_hash = written(tmp_path)
    data = PreparedData.open(directory)
    assert data.data_hash == data_hash
    assert data.train.document(1) == [3, 4, 5]


def test_equal_data_has_an_equal_hash_and_other_data_another(tmp_path):
    _, first = written(tmp_path / "first")
    _, same = written(tmp_path / "second")
    _, other = written(tmp_path / "third", num_tokens=6)
    assert first == same != other


def test_every_flipped_byte_is_refused(tmp_path):
    directory, _ = written(tmp_path)
    for path in all_files(directory):
        content = path.read_bytes()
        # Every byte of the manifest and of the data; of numpy's padded headers, every fifth.
        step = 1 if path.suffix == ".json" else 5
        for position in {*range(0, len(content), step), *range(max(len(content) - 40, 0), len(content))}:
            for bit in (0x01, 0x20):
                changed = bytearray(content)
                changed[position] ^= bit
                path.write_bytes(changed)
                with pytest.raises(PreparedDataError):
                    PreparedData.open(directory)
        path.write_bytes(content)
    PreparedData.open(directory)


def test_every_truncation_is_refused(tmp_path):
    directory, _ = written(tmp_path)
    for path in all_files(directory):
        content = path.read_bytes()
        for length in {*range(0, len(content), 7), len(content) - 1}:
            path.write_bytes(content[:length])
            with pytest.raises(PreparedDataError):
                PreparedData.open(directory)
        path.write_bytes(content + b"\0")
        with pytest.raises(PreparedDataError):
            PreparedData.open(directory)
        path.unlink()
        with pytest.raises(PreparedDataError, match=path.name):
            PreparedData.open(directory)
        path.write_bytes(content)
    PreparedData.open(directory)


def test_a_refusal_is_the_datas_failure_with_a_hint(tmp_path):
    with pytest.raises(PreparedDataError) as caught:
        PreparedData.open(tmp_path / "none")
    failure, hint = classify(caught.value)
    assert failure is FailureClass.USER_DATA
    assert "run preflight again" in hint


@pytest.mark.parametrize("failing", ["publish_directory", "write_durably", "sync_file"])
def test_a_failed_write_leaves_the_old_data_or_none_and_no_leftovers(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(shards, failing, fail)
        with pytest.raises(OSError, match="No space"):
            written(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_preparation_is_cleared_away_by_the_next(tmp_path):
    directory, first = written(tmp_path)
    shutil.copytree(directory, tmp_path / "prepared.tmp-0123")
    _, second = written(tmp_path)
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]

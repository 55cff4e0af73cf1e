"""Prepared data is whole or not there: every truncation and every flipped byte is refused, and no crash leaves half of it."""

import io
import shutil

import numpy as np
import pytest

from finetune_job.failures import FailureClass
from finetune_trainer.data import shard_writer, shards
from finetune_trainer.data.batches import PreparedData
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN, VALIDATION, PreparedDataError, SplitArrays, read_manifest
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


def test_written_data_is_read(tmp_path):
    directory, data_hash = written(tmp_path)
    data = PreparedData.open(directory)
    assert data.data_hash == data_hash
    assert data.train.document(1) == [3, 4, 5]


def test_numeric_keys_of_a_manifest_become_texts(tmp_path):
    lengths = {4: 1, 16: 2, 128: 3}
    write_prepared(tmp_path / "prepared", {TRAIN: arrays()}, {"pad_token_id": 0, "lengths": lengths})
    assert read_manifest(tmp_path / "prepared")["lengths"] == {str(bound): count for bound, count in lengths.items()}


def test_equal_data_has_an_equal_hash_and_other_data_another(tmp_path):
    _, first = written(tmp_path / "first")
    _, same = written(tmp_path / "second")
    _, other = written(tmp_path / "third", num_tokens=6)
    assert first == same != other


def test_every_flipped_byte_is_refused(tmp_path):
    directory, _ = written(tmp_path)
    for path in all_files(directory):
        content = path.read_bytes()
        for position in range(len(content)):
            changed = bytearray(content)
            changed[position] ^= 0x20 if position % 2 else 0x01
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


def test_a_killed_preparation_is_cleared_away_by_the_next(tmp_path):
    directory, first = written(tmp_path)
    shutil.copytree(directory, tmp_path / "prepared.tmp-0123")
    _, second = written(tmp_path)
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


@pytest.mark.parametrize("tokens_per_block", [1, 2, 4, 100])
@pytest.mark.parametrize("tokens_per_shard", [1, 2, 3, 5, 6])
def test_documents_are_read_whole_across_shards(tmp_path, monkeypatch, tokens_per_shard, tokens_per_block):
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", tokens_per_shard)
    monkeypatch.setattr(shard_writer, "TOKENS_PER_SHARD", tokens_per_shard)
    monkeypatch.setattr(shard_writer, "COPY_BYTES", tokens_per_block * shards.TOKEN_TYPE.itemsize)
    directory, _ = written(tmp_path, num_tokens=11)
    train = PreparedData.open(directory).train
    assert len(list((directory / TRAIN).glob(shards.shard_name(None)))) == -(-11 // tokens_per_shard)
    assert [train.document(index) for index in range(2)] == [[1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11]]
    assert train.batch([0]).labels[0, :11].tolist() == [-100, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_shard_that_becomes_shorter_in_use_is_an_error_and_not_zeros(tmp_path):
    directory, _ = written(tmp_path, num_tokens=11)
    train = PreparedData.open(directory).train
    shard = directory / TRAIN / shards.shard_name(0)
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(PreparedDataError, match="became shorter"):
        train.document(1)


def test_ids_and_mask_survive_their_common_form():
    tokens, supervised = np.array([0, 0, 7, 7, 2**31 - 1]), np.array([True, False, True, False, False])
    ids, mask = shards.decode(shards.encode(tokens, supervised))
    assert (ids.tolist(), mask.tolist()) == (tokens.tolist(), supervised.tolist())


def test_counts_are_read_in_blocks_wherever_the_documents_lie(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "COPY_BYTES", 10 * shard_writer.COUNTS_TYPE.itemsize)
    lengths = np.arange(1, 101)
    with shard_writer.Staging(tmp_path / "prepared") as staging:
        writer = staging.split(TRAIN)
        for part in np.split(lengths, [30, 31, 80]):
            writer.append_documents(io.BytesIO(bytes(4 * int(part.sum()))), part, part - 1)
        for documents in (np.arange(100), np.array([0, 9, 10, 55, 99]), np.array([99]), np.arange(3, 100, 17)):
            tokens, supervised = writer.counts(documents)
            assert tokens.tolist() == lengths[documents].tolist()
            assert supervised.tolist() == (lengths[documents] - 1).tolist()
        with pytest.raises(IndexError, match="document 100 is not"):
            writer.counts(np.array([100]))

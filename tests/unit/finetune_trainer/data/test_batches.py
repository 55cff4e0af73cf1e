"""Batches, written out by hand."""

import numpy as np
import pytest

from finetune_memory.model_shape import LENGTH_MULTIPLE
from finetune_trainer.data.batches import PreparedData, PreparedSplit
from finetune_trainer.data.shards import SplitArrays

X = -100


def split():
    """Two sequences: documents of 3 and 2 tokens packed, and one of 9 tokens alone."""
    return PreparedSplit.of(
        SplitArrays(
            tokens=np.array([11, 12, 13, 21, 22, 31, 32, 33, 34, 35, 36, 37, 38, 39], dtype=np.int32),
            supervised=np.array([0, 0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1], dtype=bool),
            document_ends=np.array([3, 5, 14]),
            sequence_ends=np.array([2, 3]),
            supervised_tokens=np.array([2, 8]),
        ),
        pad_token_id=7,
    )


def test_a_packed_row_resets_positions_and_pads_as_a_document_of_its_own():
    batch = split().batch([0])
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 7, 7, 7]]
    assert batch.labels.tolist() == [[X, X, 13, X, 22, X, X, X]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.num_supervised_tokens == 2


def test_rows_come_in_the_order_asked_for_and_share_the_longest_rows_width():
    batch = split().batch([1, 0])
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (2, 2 * LENGTH_MULTIPLE)
    assert batch.input_ids[0].tolist() == [31, 32, 33, 34, 35, 36, 37, 38, 39] + [7] * 7
    assert batch.position_ids[0].tolist() == [*range(9), *range(7)]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 0, 1, *range(11)]
    assert batch.num_supervised_tokens == 10 == int((batch.labels != X).sum())


def test_counts_are_known_without_reading_tokens():
    assert (split().num_sequences, split().num_documents, split().num_tokens, split().num_supervised_tokens) == (2, 3, 14, 10)
    assert split().supervised_tokens([1, 1, 0]) == 18


@pytest.mark.parametrize("index", [-1, 2])
def test_a_sequence_that_does_not_exist_is_refused(index):
    with pytest.raises(IndexError, match="is not in 0"):
        split().batch([index])


@pytest.mark.parametrize("index", [-1, 3])
def test_a_document_that_does_not_exist_is_refused(index):
    with pytest.raises(IndexError, match="is not in 0"):
        split().document(index)


def test_verification_prompts_are_whole_held_out_documents_spread_evenly():
    held_out = split()
    data = PreparedData(train=split(), validation=held_out, data_hash="")
    everything = [held_out.document(index) for index in range(3)]
    assert data.verification_prompts(2) == everything[:2]
    assert data.verification_prompts(3) == data.verification_prompts(50) == everything
    assert PreparedData(train=split(), validation=None, data_hash="").verification_prompts(1) == [everything[0]]


def test_a_pad_token_that_is_also_the_stop_token_is_learnt_where_it_ends_a_record():
    """Collators that hide every pad token teach such a model never to stop; here what is supervised is stored, not guessed."""
    stop = 7
    padded = PreparedSplit.of(
        SplitArrays(
            tokens=np.array([11, 12, stop, 21, stop], dtype=np.int32),
            supervised=np.array([0, 1, 1, 0, 1], dtype=bool),
            document_ends=np.array([3, 5]),
            sequence_ends=np.array([2]),
            supervised_tokens=np.array([3]),
        ),
        pad_token_id=stop,
    ).batch([0])
    assert padded.input_ids.tolist() == [[11, 12, stop, 21, stop, stop, stop, stop]]
    assert padded.labels.tolist() == [[X, 12, stop, X, stop, X, X, X]]


def test_rows_are_padded_to_a_length_that_they_are_to_have():
    arrays = SplitArrays(
        tokens=np.array([11, 12, 21], dtype=np.int32),
        supervised=np.array([0, 1, 0], dtype=bool),
        document_ends=np.array([2, 3]),
        sequence_ends=np.array([2]),
        supervised_tokens=np.array([1]),
    )
    batch = PreparedSplit(arrays.tables, arrays, pad_token_id=7, least_length=10).batch([0])
    # Of a multiple of 8, as ever.
    assert batch.input_ids.tolist() == [[11, 12, 21] + [7] * 13]
    assert batch.position_ids.tolist() == [[0, 1, 0, *range(13)]]
    assert batch.labels.tolist() == [[X, 12, X] + [X] * 13]
    assert (batch.document_lengths, batch.num_supervised_tokens) == ((2, 1), 1)

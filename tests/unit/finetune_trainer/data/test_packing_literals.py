"""Packing, weights and the order of sequences in small numbers that anybody can follow."""

from __future__ import annotations

import numpy as np
import pytest

from finetune_trainer.data.packing import PlanWindow, WeightedDocuments, occurrences, one_document_each, pack
from finetune_trainer.data.permutation import position
from finetune_trainer.train.batches import global_batch, micro_batch


def packed(lengths: list[int], limit: int) -> list[list[int]]:
    documents, ends = pack(lengths, limit)
    return [part.tolist() for part in np.split(documents, ends[:-1])]


@pytest.mark.parametrize(
    ("lengths", "limit", "sequences"),
    [
        # The longest first: 7, 6, 4, 3, 2, 1; 3 joins 7, 4 joins 6, and 2 and 1 share a third.
        ([6, 4, 7, 3, 2, 1], 10, [[0, 1], [2, 3], [4, 5]]),
        # 2 goes to the fuller one: 8 + 2 and not 5 + 2.
        ([5, 8, 2], 10, [[0], [1, 2]]),
        # Of rooms 5 and 3 the tightest that holds 3 is 3.
        ([5, 7, 3], 10, [[0], [1, 2]]),
        ([10, 10], 10, [[0], [1]]),
        # Ties keep the given order.
        ([5, 5, 5, 5], 10, [[0, 1], [2, 3]]),
        ([1, 1, 1, 1, 1], 2, [[0, 1], [2, 3], [4]]),
        ([4, 4, 4, 2, 2], 10, [[0, 1, 3], [2, 4]]),
    ],
)
def test_best_fit_decreasing(lengths, limit, sequences):
    assert packed(lengths, limit) == sequences


@pytest.mark.parametrize("length", [0, 11])
def test_a_length_that_no_sequence_holds_is_an_error(length):
    with pytest.raises(ValueError, match=f"document 1 has {length} tokens; it must have 1..10"):
        pack([10, length, 10], 10)


def test_weights_to_a_millionth():
    indices = np.arange(8)
    assert occurrences(1.0, indices).tolist() == [1] * 8
    assert occurrences(2.0, indices).tolist() == [2] * 8
    assert occurrences(0.5, indices).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert occurrences(1.25, indices).tolist() == [1, 1, 1, 2, 1, 1, 1, 2]
    assert occurrences(0.123457, np.array([999_999])).tolist() == [1]
    assert occurrences(0.123457, np.arange(1_000_000)).sum() == 123_457
    assert [WeightedDocuments(7, weight).occurrences for weight in (0.5, 1.0, 1.5)] == [3, 7, 10]


def test_supervised_tokens_are_counted_by_sequence():
    window = PlanWindow.of(np.array([4, 2, 7]), np.array([2, 3]), np.array([5, 6, 7]), np.array([3, 4, 6]))
    assert (window.supervised_tokens.tolist(), window.num_tokens) == ([7, 6], 18)
    documents, ends = one_document_each(3)
    assert (documents.tolist(), ends.tolist()) == ([0, 1, 2], [1, 2, 3])


def test_a_batch_goes_on_where_the_one_before_it_ended():
    first = [position(3, 0, place, 10) for place in range(10)]
    second = [position(3, 1, place, 10) for place in range(10)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != [position(4, 0, place, 10) for place in range(10)]
    assert [global_batch(step, 4, 3, 10) for step in range(3)] == [first[:4], first[4:8], first[8:] + second[:2]]
    for place in (-1, 10):
        with pytest.raises(ValueError, match=f"index {place} is not in 0..9"):
            position(3, 0, place, 10)


def test_ranks_share_a_batch_micro_step_by_micro_step():
    batch = list("abcdefgh")
    shares = [["".join(micro_batch(batch, step, rank, 2, 2)) for rank in range(2)] for step in range(2)]
    assert shares == [["ab", "cd"], ["ef", "gh"]]

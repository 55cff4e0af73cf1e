"""Packing loses nothing, doubles nothing, keeps the limit, and wastes little."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data.packing import PlanWindow, WeightedDocuments, one_document_each, pack
from finetune_trainer.data.records import occurrences


@st.composite
def lengths_and_limit(draw):
    limit = draw(st.integers(1, 64))
    return draw(st.lists(st.integers(1, limit), max_size=60)), limit


def sequences(packed):
    documents, ends = packed
    return [part.tolist() for part in np.split(documents, ends[:-1])] if len(ends) else []


def one_by_one(lengths, limit):
    """Room left in each sequence by best fit decreasing as the textbook has it."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else limit) - length)
    return sorted(rooms)


@given(lengths_and_limit())
def test_each_document_is_in_exactly_one_sequence_within_the_limit(case):
    lengths, limit = case
    packed = sequences(pack(lengths, limit))
    assert sorted(itertools.chain(*packed)) == list(range(len(lengths)))
    assert all(1 <= sum(lengths[document] for document in sequence) <= limit for sequence in packed)


@given(lengths_and_limit())
def test_it_fills_as_best_fit_decreasing_does(case):
    lengths, limit = case
    packed = sequences(pack(lengths, limit))
    assert sorted(limit - sum(lengths[document] for document in sequence) for sequence in packed) == one_by_one(lengths, limit)


@given(lengths_and_limit())
def test_order_is_kept_and_repeatable(case):
    lengths, limit = case
    packed = sequences(pack(lengths, limit))
    assert packed == sorted(sorted(sequence) for sequence in packed) == sequences(pack(np.array(lengths, dtype=np.int32), limit))


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
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
def test_best_fit_decreasing(lengths, limit, expected):
    assert sequences(pack(lengths, limit)) == expected


@pytest.mark.parametrize("length", [0, 11])
def test_a_length_that_no_sequence_holds_is_refused(length):
    with pytest.raises(ValueError, match=f"document 1 has {length} tokens; it must have 1..10"):
        pack([5, length], 10)


@pytest.mark.parametrize("mean", [60, 250, 700])
def test_common_lengths_fill_sequences_to_99_percent(mean):
    """Log-normal, cut at the limit, as records of instructions and chats are."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(mean), 0.9, 50_000).astype(int), 1, 2048)
    _, ends = pack(lengths, 2048)
    assert lengths.sum() / (len(ends) * 2048) >= 0.99


def test_without_packing_each_document_is_a_sequence():
    assert sequences(one_document_each(3)) == [[0], [1], [2]]


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

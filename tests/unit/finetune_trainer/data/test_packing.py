"""Packing loses nothing, doubles nothing, keeps the limit, and wastes little."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data.packing import one_document_each, pack


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


def test_a_document_goes_where_it_fits_tightest():
    # 7 and 6 open sequences with room for 3 and 4; 4 fills the one and 3 the other.
    assert sequences(pack([7, 6, 3, 4], 10)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("length", [0, 11])
def test_lengths_outside_the_limit_are_refused(length):
    with pytest.raises(ValueError, match="document 1 has"):
        pack([5, length], 10)


@pytest.mark.parametrize("mean", [60, 250, 700])
def test_common_lengths_fill_sequences_to_99_percent(mean):
    """Log-normal, cut at the limit, as records of instructions and chats are."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(mean), 0.9, 50_000).astype(int), 1, 2048)
    _, ends = pack(lengths, 2048)
    assert lengths.sum() / (len(ends) * 2048) >= 0.99


def test_without_packing_each_document_is_a_sequence():
    assert sequences(one_document_each(3)) == [[0], [1], [2]]

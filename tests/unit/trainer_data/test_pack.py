"""Packing loses nothing, doubles nothing, keeps the limit, and wastes little."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data.pack import one_document_each, pack


@st.composite
def lengths_and_limit(draw):
    limit = draw(st.integers(1, 64))
    return draw(st.lists(st.integers(1, limit), max_size=60)), limit


@given(lengths_and_limit())
def test_each_document_is_in_exactly_one_sequence_within_the_limit(case):
    lengths, limit = case
    sequences = pack(lengths, limit)
    assert sorted(itertools.chain(*sequences)) == list(range(len(lengths)))
    assert all(1 <= sum(lengths[document] for document in sequence) <= limit for sequence in sequences)


@given(lengths_and_limit())
def test_no_two_sequences_would_fit_into_one(case):
    """True of every algorithm that opens a sequence only where a document fits into none."""
    lengths, limit = case
    sizes = [sum(lengths[document] for document in sequence) for sequence in pack(lengths, limit)]
    assert all(first + second > limit for first, second in itertools.combinations(sizes, 2))


@given(lengths_and_limit())
def test_order_is_kept_and_repeatable(case):
    lengths, limit = case
    sequences = pack(lengths, limit)
    assert sequences == sorted(sorted(sequence) for sequence in sequences) == pack(list(lengths), limit)


def test_a_document_goes_where_it_fits_tightest():
    # 7 and 6 open sequences with room for 3 and 4; 3 fits both and takes the tighter, then 4 fills the other.
    assert pack([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("length", [0, 11])
def test_lengths_outside_the_limit_are_refused(length):
    with pytest.raises(ValueError, match="document 1 has"):
        pack([5, length], 10)


def test_without_packing_each_document_is_a_sequence():
    assert one_document_each(3) == [[0], [1], [2]]

"""A pass holds every record as often as its weight says, in whatever windows it is planned."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data import packing as pack_plan
from finetune_trainer.data.packing import WeightedDocuments, plan_windows
from finetune_trainer.data.records import occurrences

LIMIT = 20


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_plan, "BLOCK_DOCUMENTS", 3)
        yield


weights = st.integers(1, 5_000_000).map(lambda units: units / 1_000_000)


@given(weights, st.integers(0, 10**10), st.integers(1, 50))
def test_a_weight_is_exact_and_evenly_spread(weight, first, count):
    exact = Fraction(str(weight))
    expected = [int((index + 1) * exact) - int(index * exact) for index in range(first, first + count)]
    assert occurrences(weight, np.arange(first, first + count)).tolist() == expected
    assert max(expected) - min(expected) <= 1


def planned(sets, lengths, window=7, packing=True):
    lengths = np.asarray(lengths)

    def counts(documents):
        assert (np.diff(documents) > 0).all()
        return lengths[documents], lengths[documents] - 1

    return list(plan_windows(sets, counts, LIMIT, packing, window_occurrences=window))


@given(st.data(), st.booleans(), st.integers(1, 30))
def test_every_occurrence_is_in_one_sequence_and_no_sequence_is_too_long(data, packing, window):
    sets = [WeightedDocuments(data.draw(st.integers(0, 20)), data.draw(weights)) for _ in range(data.draw(st.integers(1, 3)))]
    total = sum(each.count for each in sets)
    lengths = np.array(data.draw(st.lists(st.integers(1, LIMIT), min_size=total, max_size=total)), dtype=np.int64)
    found = np.zeros(total, dtype=int)
    for each in planned(sets, lengths, window, packing):
        np.add.at(found, each.sequence_documents, 1)
        for start, stop in pairwise([0, *each.sequence_ends.tolist()]):
            assert 0 < lengths[each.sequence_documents[start:stop]].sum() <= LIMIT
            assert packing or stop == start + 1
        assert each.num_tokens == lengths[each.sequence_documents].sum()
        assert each.supervised_tokens.sum() == each.num_tokens - len(each.sequence_documents)
    assert found.tolist() == [times for each in sets for times in occurrences(each.weight, np.arange(each.count)).tolist()]
    assert found.sum() == sum(each.occurrences for each in sets)


def test_each_window_mixes_all_data_sets_and_all_parts_of_them():
    sets = [WeightedDocuments(300, 1.0), WeightedDocuments(100, 2.0)]
    windows = planned(sets, np.full(400, 3), window=50)
    assert len(windows) == 10
    for window in windows:
        documents = window.sequence_documents
        assert np.isclose((documents >= 300).mean(), 0.4, atol=0.05)
        assert documents.min() < 15
        assert documents.max() >= 385


def test_copies_of_a_record_share_no_sequence_where_others_have_its_length():
    (window,) = planned([WeightedDocuments(40, 2.0)], np.full(40, 9), window=1000)
    for start, stop in pairwise([0, *window.sequence_ends.tolist()]):
        documents = window.sequence_documents[start:stop].tolist()
        assert len(set(documents)) == len(documents) == 2

"""The cases of the sweep cover what they are said to cover."""

import itertools

import pytest

from tests.sweep.covering import covering_array, pairs_of, pairs_to_cover


@pytest.mark.nightly
def test_every_pair_of_values_that_can_stand_together_is_covered() -> None:
    covered = set(itertools.chain.from_iterable(pairs_of(case.values) for case in covering_array(1)))
    assert pairs_to_cover() <= covered

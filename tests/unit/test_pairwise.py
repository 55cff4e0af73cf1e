"""The rows of the matrix of values."""

from __future__ import annotations

import itertools

from tests.support.pairwise import pairwise


def test_every_two_values_meet_and_the_first_row_has_the_defaults() -> None:
    parameters = {"a": [0, 1, 2], "b": ["x", "y"], "c": [True, False], "d": [None, 1, 2, 3], "e": ["only"]}
    rows = pairwise(parameters)
    assert rows[0] == {"a": 0, "b": "x", "c": True, "d": None, "e": "only"}
    for one, other in itertools.combinations(parameters, 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(parameters[one], parameters[other])), (one, other)
    assert len(rows) <= 14
    assert pairwise(parameters) == rows

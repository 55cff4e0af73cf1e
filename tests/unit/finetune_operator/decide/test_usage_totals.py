"""Sums over accounts. What of an account counts, and when, is in test_account.py."""

from __future__ import annotations

from finetune_operator.decide.usage_totals import SECONDS_BOUNDS, DurationCounts


def test_durations_are_counted_up_to_a_bound_and_above_the_last() -> None:
    """By position: what is on record would be told under other bounds if they changed."""
    assert SECONDS_BOUNDS == (1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 86_400, 259_200)
    found = DurationCounts()
    for seconds in (0.0, 1.0, 1.5, 5.0, 259_200.0, 259_201.0, 1e9):
        found = found.plus(seconds)
    assert found.counts == (2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2)
    assert found.total == 0.0 + 1.0 + 1.5 + 5.0 + 259_200.0 + 259_201.0 + 1e9

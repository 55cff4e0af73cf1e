"""The interval that loses the least time, next to a plain search for it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.checkpoint.interval import best_interval


def test_the_figures_of_the_publication() -> None:
    """Computed by hand: a save of 8 s and a loss each hour; Young alone gives 240 s."""
    assert best_interval(8, 3600) == pytest.approx(240 * (1 + 1 / 90 + 1 / 8100) - 8)


def test_losses_that_come_as_fast_as_saves_are_the_interval_themselves() -> None:
    assert best_interval(8, 4) == 4
    assert best_interval(8, 3) == 3
    assert best_interval(8, 4.1) == pytest.approx(4.1, rel=0.12)


def expected_seconds(interval: float, save: float, between: float) -> float:
    """Of one second of work, losses being exponential and a restart taking no time (Daly, equation 13)."""
    return between / interval * math.expm1((interval + save) / between)


@given(save=st.floats(0.01, 100), ratio=st.floats(2.1, 10_000))
def test_no_other_interval_is_much_better(save: float, ratio: float) -> None:
    between = save * ratio
    tried = [between * 1.02 ** (-power) for power in range(700)]
    best = min(expected_seconds(interval, save, between) for interval in tried)
    assert expected_seconds(best_interval(save, between), save, between) <= 1.01 * best

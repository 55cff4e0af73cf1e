"""Curves: which points are drawn, where, and what is said of them to those who do not see them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.report.charts import HEIGHT, MAX_POINTS, WIDTH, Series, chart, describe, number, thin, ticks
from tests.support.cases import table


def test_a_curve_is_where_its_values_are() -> None:
    drawn = chart("Loss", [Series("loss", [(0, 2.0), (5, 1.0), (10, 0.0)])], events=[5, 99])
    assert drawn is not None
    # 58 on the left and 22 on the right of 400 are for labels, 12 above and 30 below of 220.
    assert drawn.curves[0].line == [(58, 12), (218, 101), (378, 190)]
    assert (drawn.curves[0].band, drawn.curves[0].marks) == ([], [])
    assert [(tick.at, tick.label) for tick in drawn.y_ticks] == [(190, "0"), (145.5, "0.5"), (101, "1"), (56.5, "1.5"), (12, "2")]
    assert [(tick.at, tick.label) for tick in drawn.x_ticks] == [(58, "0"), (218, "5"), (378, "10")]
    assert drawn.events == (218,)
    assert drawn.description == "loss: 2 at step 0, 0 at step 10; lowest 0 at step 10, highest 2 at step 0."


def test_two_curves_share_their_axes_and_few_values_are_marked() -> None:
    drawn = chart("Loss", [Series("a", [(0, 4.0), (10, 0.0)]), Series("b", [(10, 2.0)], has_marks=True)])
    assert drawn is not None
    assert drawn.curves[1].marks == [(378, 101)]
    assert drawn.description.count("at step") == 8


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, math.nan), (2, math.inf), (3, 1.0)], [(1, 1e300), (2, -1e300)]])
def test_what_makes_no_curve_is_not_drawn(points: list[tuple[float, float]]) -> None:
    assert chart("Loss", [Series("loss", points)]) is None


def test_many_points_are_means_of_neighbours_with_a_band_that_keeps_the_extremes() -> None:
    points = [(step, 100.0 if step == 777 else float(step % 2)) for step in range(1001)]
    groups = thin(points)
    assert len(groups) == MAX_POINTS
    assert (groups[0].step, groups[-1].step) == (0, 1000)
    assert max(group.largest for group in groups) == 100.0
    assert {round(group.mean, 1) for group in groups[1:100]} <= {0.4, 0.5, 0.6}
    drawn = chart("Loss", [Series("loss", points)])
    assert drawn is not None
    assert len(drawn.curves[0].band) == 2 * MAX_POINTS


@pytest.mark.parametrize(("lowest", "highest", "inside", "around"), table(__file__, "test_ticks_are_round_numbers"))
def test_ticks_are_round_numbers(lowest: float, highest: float, inside: list[float], around: list[float]) -> None:
    assert ticks(lowest, highest) == pytest.approx(inside)
    assert ticks(lowest, highest, outward=True) == pytest.approx(around)


@pytest.mark.parametrize(("value", "text"), table(__file__, "test_numbers_are_short"))
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_name_stays_on_its_line() -> None:
    assert describe(Series("a\nb\u202e", [(1, 1.0)])).startswith("a b:")


VALUES = st.floats() | st.sampled_from([1e100, -1e100, 5e-324, 0.0])


@given(st.lists(st.tuples(st.integers(0, 2**60).map(float), VALUES), max_size=30).map(sorted))
def test_no_numbers_of_strangers_leave_the_drawing(points: list[tuple[float, float]]) -> None:
    drawn = chart("Loss", [Series("loss", points)])
    if drawn is not None:
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in drawn.curves[0].line)
        assert len(drawn.y_ticks) < 12

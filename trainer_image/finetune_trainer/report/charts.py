"""Curves as the coordinates of an SVG: pure functions over points. The template draws them, so that no text is markup here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from finetune_trainer.markdown import one_line

WIDTH, HEIGHT = 400.0, 220.0
"""Size of the drawing, in its own units: narrow enough that text keeps its size on a phone."""
LEFT, RIGHT, TOP, BOTTOM = 58.0, 378.0, 12.0, 190.0
"""Edges of the plotted area; labels are around it."""
MAX_POINTS = 200
"""Largest number of points of a curve. Of longer curves, neighbours are drawn as their mean, with a band from the smallest to the
largest.
"""
MOST, SMALLEST = 1e100, 1e-300
"""Bounds of a drawn value, and of an axis with more than one value: beyond them there is no power of ten to count in. Infinity
and NaN are not drawn either.
"""
_TICKS = 4

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """Values by step."""

    name: str
    points: Points
    has_marks: bool = False
    """Whether each value is marked, which shows few values and distinguishes two curves without colours."""


@dataclass(frozen=True)
class Tick:
    """A label of an axis and its place."""

    at: float
    label: str


@dataclass(frozen=True)
class Curve:
    """One drawn series: the corners of its line, and of a polygon around it, which may be empty."""

    name: str
    line: Points
    band: Points
    marks: Points


@dataclass(frozen=True)
class Chart:
    """Everything that is drawn, in units of the drawing."""

    title: str
    description: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    events: tuple[float, ...]
    """Places of events: x of a vertical line."""


def chart(title: str, series: Sequence[Series], events: Sequence[float] = ()) -> Chart | None:
    """Series over one pair of axes; None if nothing can be drawn. Values that are not finite are left out.

    events: steps at which the run was resumed.
    """
    finite = [Series(one_series.name, finite_points(one_series.points), one_series.has_marks) for one_series in series]
    drawn = [one_series for one_series in finite if one_series.points]
    if not any(len(one_series.points) > 1 for one_series in drawn):
        return None
    thinned = [(one_series, thin(one_series.points)) for one_series in drawn]
    steps = [step for one_series in drawn for step, _ in one_series.points]
    values = [value for one_series in drawn for _, value in one_series.points]
    x_range, y_ticks = (min(steps), max(steps)), ticks(min(values), max(values), outward=True)
    y_range = (min(*values, y_ticks[0]), max(*values, y_ticks[-1]))

    def place(step: float, value: float) -> tuple[float, float]:
        across = LEFT + (RIGHT - LEFT) * _share(step, x_range)
        return round(across, 1), round(BOTTOM - (BOTTOM - TOP) * _share(value, y_range), 1)

    curves = []
    for one_series, groups in thinned:
        middle = [place(group.step, group.mean) for group in groups]
        band = [place(group.step, group.largest) for group in groups]
        band += [place(group.step, group.smallest) for group in reversed(groups)]
        is_thinned = any(group.smallest < group.largest for group in groups)
        curves.append(Curve(one_series.name, middle, band if is_thinned else [], middle if one_series.has_marks else []))
    return Chart(
        title=title,
        description=" ".join(describe(one_series) for one_series in drawn),
        curves=tuple(curves),
        x_ticks=tuple(Tick(place(step, 0)[0], number(step)) for step in ticks(*x_range)),
        y_ticks=tuple(Tick(place(0, value)[1], number(value)) for value in y_ticks),
        events=tuple(place(step, 0)[0] for step in events if x_range[0] <= step <= x_range[1]),
    )


@dataclass(frozen=True)
class Group:
    """Neighbouring points."""

    step: float
    mean: float
    smallest: float
    largest: float


def thin(points: Points, most: int = MAX_POINTS) -> list[Group]:
    """Form at most `most` groups of neighbours with about equally many points; the first and the last point are alone."""
    if len(points) <= most:
        return [Group(step, value, value, value) for step, value in points]
    inner = points[1:-1]
    edges = [round(position * len(inner) / (most - 2)) for position in range(most - 1)]
    parts = [points[:1], *(inner[first:last] for first, last in pairwise(edges)), points[-1:]]
    groups = []
    for part in parts:
        values = [value for _, value in part]
        groups.append(Group(part[len(part) // 2][0], sum(values) / len(values), min(values), max(values)))
    return groups


def ticks(lowest: float, highest: float, *, outward: bool = False) -> list[float]:
    """About `_TICKS` round numbers, 1, 2 or 5 times a power of ten apart: between the two, or just around them."""
    span = highest - lowest
    if span < SMALLEST:
        return [lowest]
    rough = span / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    inward = math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9)
    first, last = (math.floor(lowest / step + 1e-9), math.ceil(highest / step - 1e-9)) if outward else inward
    return [position * step for position in range(first, last + 1)]


def describe(series: Series) -> str:
    """Description of a curve for readers who do not see it."""
    values = [value for _, value in series.points]
    low_step, low = min(series.points, key=lambda point: point[1])
    high_step, high = max(series.points, key=lambda point: point[1])
    return (
        f"{one_line(series.name)}: {number(values[0])} at step {number(series.points[0][0])}, {number(values[-1])} at step "
        f"{number(series.points[-1][0])}; lowest {number(low)} at step {number(low_step)}, highest {number(high)} at step "
        f"{number(high_step)}."
    )


def number(value: float) -> str:
    """Short text of a number, for axes."""
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def finite_points(points: Points) -> Points:
    """Points that can be drawn."""
    return [(step, value) for step, value in points if abs(step) <= MOST and abs(value) <= MOST]


def _share(value: float, bounds: tuple[float, float]) -> float:
    lowest, highest = bounds
    return (value - lowest) / (highest - lowest) if highest > lowest else 0.5

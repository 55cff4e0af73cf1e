"""Pure functions that turn points into coordinates of an SVG. The template draws the curves, so this module writes no markup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from finetune_trainer.markdown import one_line

WIDTH, HEIGHT = 400.0, 220.0
"""Size of the drawing in its own units. It is so narrow that a phone does not shrink the text."""
LEFT, RIGHT, TOP, BOTTOM = 58.0, 378.0, 12.0, 190.0
"""Edges of the plotted area. Labels are outside them."""
MAX_POINTS = 200
"""Maximum number of points of a curve. In longer curves, neighbouring points are drawn as their mean, with a band from the
smallest value to the largest.
"""
MOST, SMALLEST = 1e100, 1e-300
"""Largest value that is drawn, and smallest span of an axis with several ticks: beyond these, powers of ten overflow or
underflow. Infinity and NaN are not drawn either.
"""
_TICKS = 4

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A named series of values, each at its step."""

    name: str
    points: Points
    has_marks: bool = False
    """Whether each value has a mark. Marks show single values, and distinguish two curves without colour."""


@dataclass(frozen=True)
class Tick:
    """An axis label and its position."""

    at: float
    label: str


@dataclass(frozen=True)
class Curve:
    """One drawn series: the corners of its line, and those of the band around the line, which may be empty."""

    name: str
    line: Points
    band: Points
    marks: Points


@dataclass(frozen=True)
class Chart:
    """Everything that a chart shows, in units of the drawing."""

    title: str
    description: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    events: tuple[float, ...]
    """The x coordinate of a vertical line for each event."""


def chart(title: str, series: Sequence[Series], events: Sequence[float] = ()) -> Chart | None:
    """Draw series over one pair of axes, leaving out values that are not finite; None if no series has two values left.

    events: steps at which the run was resumed.
    """
    drawn = [replace(curve, points=points) for curve in series if (points := finite_points(curve.points))]
    if not any(len(curve.points) > 1 for curve in drawn):
        return None
    steps, values = zip(*(point for curve in drawn for point in curve.points), strict=True)
    x_range, y_ticks = (min(steps), max(steps)), ticks(min(values), max(values), outward=True)
    y_range = (min(*values, y_ticks[0]), max(*values, y_ticks[-1]))

    def place(step: float, value: float) -> tuple[float, float]:
        across, up = _share(step, x_range), _share(value, y_range)
        return round(LEFT + (RIGHT - LEFT) * across, 1), round(BOTTOM - (BOTTOM - TOP) * up, 1)

    curves = []
    for curve in drawn:
        groups = thin(curve.points)
        middle = [place(group.step, group.mean) for group in groups]
        band = [place(group.step, group.largest) for group in groups]
        band += [place(group.step, group.smallest) for group in reversed(groups)]
        is_thinned = any(group.smallest < group.largest for group in groups)
        curves.append(Curve(curve.name, middle, band if is_thinned else [], middle if curve.has_marks else []))
    return Chart(
        title=title,
        description=" ".join(map(describe, drawn)),
        curves=tuple(curves),
        x_ticks=tuple(Tick(place(step, 0)[0], number(step)) for step in ticks(*x_range)),
        y_ticks=tuple(Tick(place(0, value)[1], number(value)) for value in y_ticks),
        events=tuple(place(step, 0)[0] for step in events if x_range[0] <= step <= x_range[1]),
    )


@dataclass(frozen=True)
class Group:
    """Neighbouring points that are drawn as one."""

    step: float
    mean: float
    smallest: float
    largest: float


def thin(points: Points, most: int = MAX_POINTS) -> list[Group]:
    """Group neighbouring points into at most `most` groups of about equal size. The first and last points stay single."""
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
    """Choose about `_TICKS` round numbers, 1, 2 or 5 times a power of ten apart. outward: cover the bounds."""
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
    """Describe a curve in words, for readers who do not see it."""

    def at(point: tuple[float, float]) -> str:
        return f"{number(point[1])} at step {number(point[0])}"

    points = series.points
    lowest, highest = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    return f"{one_line(series.name)}: {at(points[0])}, {at(points[-1])}; lowest {at(lowest)}, highest {at(highest)}."


def number(value: float) -> str:
    """Format a number as a short text for axes."""
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def finite_points(points: Points) -> Points:
    """Return the points that can be drawn."""
    return [(step, value) for step, value in points if abs(step) <= MOST and abs(value) <= MOST]


def _share(value: float, bounds: tuple[float, float]) -> float:
    lowest, highest = bounds
    return (value - lowest) / (highest - lowest) if highest > lowest else 0.5

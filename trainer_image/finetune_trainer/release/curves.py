"""What history.jsonl says of a run: counts, losses, and curves as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WIDTH = 60
"""Most characters of a curve."""
ROWS = 12
"""Most rows of the table."""
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Point:
    """One optimizer step, or the state before the first."""

    step: int
    loss: float | None
    """Mean over the supervised tokens of the step; None before the first."""
    eval_loss: float | None
    """Mean over the supervised held-out tokens; None where nothing was held out or evaluated."""


@dataclass(frozen=True)
class Course:
    """A run, from its history."""

    points: tuple[Point, ...]
    tokens: int
    supervised_tokens: int

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Step and held-out loss."""
        return [(point.step, point.eval_loss) for point in self.points if point.eval_loss is not None]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and training loss."""
        return [(point.step, point.loss) for point in self.points if point.loss is not None]


def course(lines: Sequence[Mapping[str, Any]]) -> Course:
    """The last line of a step counts: a run that went back has written it again."""
    by_step = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    kept = [by_step[step] for step in sorted(by_step)]
    points = tuple(Point(line["step"], _number(line.get("loss")), _number(line.get("eval_loss"))) for line in kept)
    return Course(points, sum(line.get("tokens", 0) for line in kept), sum(line.get("supervised_tokens", 0) for line in kept))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """One character for each value, or for the mean of neighbours where there are more than `width`."""
    if len(values) > width:
        edges = [round(number * len(values) / width) for number in range(width + 1)]
        values = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    lowest, highest = min(values), max(values)
    span = (highest - lowest) or 1.0
    return "".join(_BARS[min(int((value - lowest) / span * len(_BARS)), len(_BARS) - 1)] for value in values)


def chosen(points: Sequence[Point], most: int = ROWS) -> list[Point]:
    """Points for the table: those with a held-out loss, or all where there are none; evenly thinned, first and last kept."""
    evaluated = [point for point in points if point.eval_loss is not None]
    from_these = evaluated if len(evaluated) > 1 else list(points)
    if len(from_these) <= most:
        return from_these
    return [from_these[round(number * (len(from_these) - 1) / (most - 1))] for number in range(most)]

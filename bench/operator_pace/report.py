"""The table, and the thresholds that a nightly run must keep.

The operator is made for 1,000 jobs in 300 MB of memory. How soon they have a first child, what CPU their lives take, and how soon
an operator has read them, depends on the machine. So those thresholds are multiples of the floor, the time that its API server
takes for three objects of each job without an operator: 5 s and 10 s until the first child, 40 ms of CPU per life, and 4 s to
read, on a machine with a floor of 4.3 s. The rate of the newcomers is the target's 20 a second divided in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

THRESHOLDS = Path(__file__).parents[1] / "operator_thresholds.json"


def figures(results: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number by its dotted name."""
    for name, value in results.items():
        if isinstance(value, dict):
            yield from figures(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def thresholds_of(num_jobs: int) -> dict[str, float]:
    """The most that each figure may be at so many jobs; none where nothing is promised for that number."""
    listed: dict[str, dict[str, float]] = json.loads(THRESHOLDS.read_text())
    return listed["any"] | listed.get(str(num_jobs), {})


def exceeded(results: dict[str, Any], num_jobs: int) -> list[str]:
    """A line for each figure that is above its threshold, or missing."""
    found = dict(figures(results))
    lines = []
    for name, most in thresholds_of(num_jobs).items():
        value = found.get(name, math.nan)
        if not value <= most:
            lines.append(f"{name} is {value:.3g}, and may be {most:.3g} at most")
    return lines


def table(results: dict[str, Any], num_jobs: int) -> str:
    """Figures next to their thresholds."""
    most = thresholds_of(num_jobs)
    rows = [(name, f"{value:.3f}", f"{most[name]:g}" if name in most else "") for name, value in figures(results)]
    widths = [max(len(row[column]) for row in [("figure", "measured", "at most"), *rows]) for column in range(3)]
    lines = [
        f"{name:<{widths[0]}}  {value:>{widths[1]}}  {bound:>{widths[2]}}"
        for name, value, bound in [("figure", "measured", "at most"), *rows]
    ]
    return "\n".join(lines)

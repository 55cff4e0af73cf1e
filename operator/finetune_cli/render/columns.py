"""Tables, bars and curves made of characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return rows as a table whose columns are as wide as their widest cell, and two spaces apart."""
    lines = [header, *rows] if header else list(rows)
    widths = [max((len(row[column]) for row in lines), default=0) for column in range(len(lines[0]) if lines else 0)]
    return "".join(
        (indent + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip() + "\n" for row in lines
    )


def bar(share: float, width: int = 30) -> str:
    """Draw a bar such as `[####------]`. share: 0 to 1."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return f"[{'#' * filled}{'-' * (width - filled)}]"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draw a curve of at most `width` characters, each of which shows the mean of a section of the values."""
    width = min(width, len(values))
    if not width:
        return ""
    bounds = [round(place * len(values) / width) for place in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(bounds)]
    low, span = min(means), max(means) - min(means)
    return "".join(_LEVELS[round((mean - low) / span * (len(_LEVELS) - 1))] if span else _LEVELS[0] for mean in means)


def figure(number: float | None, form: str = ".4g") -> str:
    """Format a number as text; `-` for None."""
    return "-" if number is None else format(number, form)

"""Writes users' text in Markdown so that it is shown as it is and never interpreted as markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NOT_PRINTED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def one_line(text: str) -> str:
    """Return the text with line breaks, control characters and bidirectional controls replaced by spaces."""
    return _NOT_PRINTED.sub(" ", text).strip()


def code(text: object) -> str:
    """Return a code span that shows this text on one line (CommonMark, section 6.1)."""
    plain = one_line(str(text))
    if not plain:
        return "(empty)"
    longest = max((len(run) for run in re.findall(r"`+", plain)), default=0)
    fence = "`" * (longest + 1)
    padded = f" {plain} " if plain.startswith("`") or plain.endswith("`") or longest else plain
    return f"{fence}{padded}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in GitHub's Markdown. Each cell is one line of Markdown."""
    lines = [_row(header), "|" + " --- |" * len(header)]
    return [*lines, *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    # A pipe ends a cell even in a code span, so it is escaped; table renderers remove the backslash again.
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def block(text: str, language: str = "") -> list[str]:
    """Return the lines of a fenced code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text.rstrip("\n"), fence]

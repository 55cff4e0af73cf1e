"""Users' text in Markdown, shown as it is and never taken for markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NOT_PRINTED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def one_line(text: str) -> str:
    """Text without line breaks, control characters and changes of the writing direction."""
    return _NOT_PRINTED.sub(" ", text).strip()


def code(text: object) -> str:
    """A code span that holds exactly this text (CommonMark, section 6.1)."""
    plain = one_line(str(text))
    if not plain:
        return "(empty)"
    longest = max((len(run) for run in re.findall(r"`+", plain)), default=0)
    fence = "`" * (longest + 1)
    padded = f" {plain} " if plain.startswith("`") or plain.endswith("`") or longest else plain
    return f"{fence}{padded}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of GitHub's Markdown; cells are Markdown of one line."""
    lines = [_row(header), "|" + " --- |" * len(header)]
    return [*lines, *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    # A pipe ends a cell even in a code span, and only there the backslash before it is removed again.
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def block(text: str, language: str = "") -> list[str]:
    """A fenced block that no line of the text can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text.rstrip("\n"), fence]

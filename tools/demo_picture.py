"""`python -m tools.demo_picture`: draw docs/pictures/demo.svg from docs/pictures/demo.txt, which `make demo` printed.

The recording does not contain the command lines of make, its first warning, progress bars, or paths of the machine.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
FONT_SIZE, CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 13, 7.8, 18, 16
_COLOURS = (
    (re.compile(r"^\$ .*"), "#ffffff"),
    (re.compile(r"^Done\.|succeeded|\bpassed\b|\bPassed\b"), "#7ee787"),
    (re.compile(r"^quickstart:|^  [a-z -]+:"), "#79c0ff"),
)


def picture(text: str) -> str:
    """Draw a terminal that shows this text."""
    lines = text.rstrip("\n").split("\n")
    width = round(max(map(len, lines)) * CHARACTER_WIDTH + 2 * MARGIN)
    height = len(lines) * LINE_HEIGHT + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE_HEIGHT * number + FONT_SIZE}" xml:space="preserve">{_coloured(line)}</text>'
        for number, line in enumerate(lines)
        if line
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT_SIZE}" fill="#c9d1d9">\n'
        "<title>What make demo prints</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def _coloured(line: str) -> str:
    """Mark the words of a line that have a colour of their own."""
    marks = sorted((match.start(), match.end(), colour) for pattern, colour in _COLOURS for match in pattern.finditer(line))
    parts, position = [], 0
    for start, end, colour in marks:
        parts += [escape(line[position:start]), f'<tspan fill="{colour}">{escape(line[start:end])}</tspan>']
        position = end
    return "".join([*parts, escape(line[position:])])


if __name__ == "__main__":
    (PICTURES / "demo.svg").write_text(picture((PICTURES / "demo.txt").read_text()))

"""`python -m tools.diagrams`: draw each docs/pictures/*.toml (boxes on a grid, with arrows between them) as an SVG."""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN, TITLE = 190, 78, 46, 56, 24, 34
LINE_HEIGHT, ARC = 17, 22
FILLS = {"": "#eef4ff", "pod": "#e8f7ec", "end": "#fff1e5"}
"""Fill colour of a box by its kind: a step, a pod of a job, or something outside or final."""
_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#57606a"/></marker></defs>'
)


def picture(source: dict[str, Any]) -> str:
    """Draw a diagram. Raises KeyError if an arrow names an unknown box."""
    corners = {
        box["id"]: (MARGIN + column * (WIDTH + GAP_X), MARGIN + TITLE + row * (HEIGHT + GAP_Y))
        for box in source["box"]
        for column, row in [box["at"]]
    }
    width = max(x for x, _ in corners.values()) + WIDTH + MARGIN
    height = max(y for _, y in corners.values()) + HEIGHT + MARGIN
    arrows = [_arrow(corners[arrow["from"]], corners[arrow["to"]], is_over=arrow.get("over", False)) for arrow in source["arrow"]]
    boxes = [_box(box, *corners[box["id"]]) for box in source["box"]]
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="13" fill="#1f2328"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            f"<title>{escape(source['title'])}</title>",
            _HEAD,
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="{MARGIN}" y="{MARGIN + 6}" font-size="16" font-weight="600">{escape(source["title"])}</text>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


def _box(box: dict[str, Any], x: int, y: int) -> str:
    rows = [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{FILLS[box.get("kind", "")]}" stroke="#8c959f"/>'
    ]
    for number, line in enumerate(box["text"]):
        weight = ' font-weight="600"' if number == 0 else ""
        place = f'x="{x + WIDTH // 2}" y="{y + 24 + number * LINE_HEIGHT}" text-anchor="middle"'
        rows.append(f"<text {place}{weight}>{escape(line)}</text>")
    return "\n".join(rows)


def _arrow(start: tuple[int, int], end: tuple[int, int], *, is_over: bool) -> str:
    """Draw an arrow from one box to another. is_over: whether it passes above the boxes between them."""
    (x, y), (to_x, to_y) = start, end
    middle = HEIGHT // 2
    if is_over:
        left, right = x + WIDTH * 3 // 4, to_x + WIDTH // 4
        path = f"M{left} {y} V{y - ARC} H{right} V{to_y - 2}"
    elif y == to_y and to_x > x:
        shift = -8 if to_x - x == WIDTH + GAP_X else 0
        path = f"M{x + WIDTH} {y + middle + shift} H{to_x - 2}"
    elif y == to_y:
        path = f"M{x} {y + middle + 8} H{to_x + WIDTH + 2}"
    elif x == to_x:
        path = f"M{x + WIDTH // 2} {y + HEIGHT} V{to_y - 2}"
    elif to_y > y:
        between = y + HEIGHT + GAP_Y // 2
        path = f"M{x + WIDTH // 2} {y + HEIGHT} V{between} H{to_x + WIDTH // 2} V{to_y - 2}"
    else:
        between = y - GAP_Y // 2 + 8
        path = f"M{x + WIDTH * 3 // 4} {y} V{between} H{to_x + WIDTH // 2} V{to_y + HEIGHT + 2}"
    return f'<path d="{path}" fill="none" stroke="#57606a" stroke-width="1.4" marker-end="url(#head)"/>'


def main() -> None:
    """Draw all diagrams."""
    for path in sorted(PICTURES.glob("*.toml")):
        path.with_suffix(".svg").write_text(picture(tomllib.loads(path.read_text())))


if __name__ == "__main__":
    main()

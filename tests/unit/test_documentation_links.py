"""Links between pages lead to files and headings that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for folder in ("", "docs", "charts", "examples") for path in ROOT.glob(f"{folder}/**/*.md" if folder else "*.md")
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As pages are shown: lower case, no punctuation, hyphens for spaces."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(page.read_text())}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in _LINK.findall(page.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[good](#a-heading) [bad](#none) [gone](other.md) [far](https://example.org/x)\n")
    assert broken_links(page) == ["#none", "other.md"]

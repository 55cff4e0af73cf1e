"""The diagrams of the documentation."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools.diagrams import PICTURES, WIDTH, picture

SOURCES = sorted(PICTURES.glob("*.toml"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_committed_picture_is_drawn_from_its_source(path: Path) -> None:
    assert path.with_suffix(".svg").read_text() == picture(tomllib.loads(path.read_text())), "run `make generate`"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_line_fits_into_its_box(path: Path) -> None:
    lines = [line for box in tomllib.loads(path.read_text())["box"] for line in box["text"]]
    assert len(lines) > 20
    # A character of a wide font takes 7 units at this size in the mean.
    assert not [line for line in lines if len(line) * 7 > WIDTH]


def test_an_arrow_to_nowhere_is_an_error() -> None:
    box = {"id": "one", "at": [0, 0], "text": ["one"]}
    with pytest.raises(KeyError, match="two"):
        picture({"title": "t", "box": [box], "arrow": [{"from": "one", "to": "two"}]})

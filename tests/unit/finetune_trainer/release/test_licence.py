"""The base model's licence, as its own files state it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.release.licence import Licence, read_front_matter, read_licence


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"README.md": "---\nlicense: apache-2.0\n---\n"}, Licence("apache-2.0")),
        ({"README.md": "---\nlicense: [mit, apache-2.0]\n---\n"}, Licence("mit")),
        ({"README.md": "---\nlicense: {a: b}\n---\n", "LICENSE": "x"}, Licence(files=("LICENSE",))),
        ({"README.md": "---\nlicense: 'no such: thing'\n---\n"}, Licence()),
        ({"README.md": "---\n: [\n---\n"}, Licence()),
        ({"README.md": "no front matter"}, Licence()),
        ({"config.json": '{"license": "MIT"}'}, Licence("mit")),
        ({"config.json": "[]", "NOTICE.txt": "x"}, Licence(files=("NOTICE.txt",))),
        ({}, Licence()),
    ],
)
def test_the_licence_is_what_the_base_says(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert read_licence(tmp_path) == expected


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_any_card_of_a_base_can_be_read(text):
    assert isinstance(read_front_matter(f"---\n{text}\n---\n"), dict)

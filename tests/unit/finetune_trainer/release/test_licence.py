"""The base model's licence, as its own files state it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.release.licence import read_front_matter, read_licence
from tests.support.cases import table


@pytest.mark.parametrize(("files", "expected"), table(__file__, "test_the_licence_is_what_the_base_says"))
def test_the_licence_is_what_the_base_says(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    found = read_licence(tmp_path)
    assert (found.identifier, list(found.files)) == (expected.get("identifier", ""), expected.get("files", []))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_any_card_of_a_base_can_be_read(text):
    assert isinstance(read_front_matter(f"---\n{text}\n---\n"), dict)

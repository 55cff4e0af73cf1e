"""The picture of `make demo` on the first page is drawn from the recorded text."""

import re
from html import unescape

from tools.demo_picture import PICTURES, picture


def test_the_picture_shows_the_recorded_text() -> None:
    text = (PICTURES / "demo.txt").read_text()
    drawn = (PICTURES / "demo.svg").read_text()
    assert drawn == picture(text), "run: make generate"
    rows = [unescape(re.sub("<[^>]*>", "", row)) for row in re.findall(r"<text .*?</text>", drawn)]
    assert rows == [line for line in text.splitlines() if line]


def test_the_recording_names_no_place_of_a_machine() -> None:
    text = (PICTURES / "demo.txt").read_text()
    assert re.findall(r"(?<![\w.])/\w+/\S+", text) == []
    assert "verification:  passed" in text


def test_characters_that_have_a_meaning_in_a_picture_are_shown() -> None:
    assert "a &lt;b&gt; &amp; c" in picture("a <b> & c\n")

"""Text of users in Markdown is shown as it is."""

import re

import pytest

from finetune_trainer.markdown import block, code, table


@pytest.mark.parametrize("text", ["plain", "`", "``a`", "a`b", " `x", "x\ny", "", "a|b"])
def test_a_code_span_holds_its_text(text):
    span = code(text)
    assert "\n" not in span
    fence = re.match(r"`*", span)[0]
    assert span.endswith(fence)
    assert fence not in span[len(fence) : -len(fence) or None].replace(" ", "") or not fence


def test_a_pipe_does_not_end_a_cell():
    assert table(("a",), [("`x|y`",)])[-1] == "| `x\\|y` |"
    assert block("```\nx")[0] == "````"

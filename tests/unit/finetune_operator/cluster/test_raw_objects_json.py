"""Objects of strangers as JSON: the quick reader refuses what the standard library takes, and neither may end a list."""

import json

import pytest

from finetune_operator.cluster.raw_objects import read_json, write_json


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5, null, true, "\\u00e9\\u2028"]}',
        '{"a": "\\ud800"}',
        '{"a": "\\udc00x\\ud83d"}',
        '{"a": 123456789012345678901234567890}',
        '{"a": 1e400}',
        '{"a": -0.0}',
        '{"a": 1, "a": 2}',
        "[" * 500 + "]" * 500,
    ],
    ids=["plain", "half a surrogate", "halves", "large integer", "infinite", "minus nought", "twice", "nested"],
)
def test_what_the_standard_library_reads_is_read_alike_and_can_be_written(text: str) -> None:
    value = read_json(text.encode())
    assert value == json.loads(text)
    assert json.loads(write_json(value)) == value


def test_what_is_no_json_is_refused() -> None:
    for content in (b"", b"{", b"{'a': 1}", b"\xff"):
        with pytest.raises(ValueError):
            read_json(content)

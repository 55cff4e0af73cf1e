"""The size of a spec as it is stored, and the part to shorten."""

import pytest

from finetune_job.api.size import check_size, json_bytes


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, 2),
        ({"a": 1}, len('{"a":1}')),
        ({"a": [1, "b"]}, len('{"a":[1,"b"]}')),
        # As the API server writes them: \u003c and \u00e9.
        ("<", 8),
        ("é", 8),
    ],
)
def test_bytes_in_the_longest_way_of_writing(content: object, expected: int) -> None:
    assert json_bytes(content) == expected


def test_the_part_that_holds_most_is_named() -> None:
    content = {"model": {"source": "x"}, "method": {"settings": {"text": "y" * 500}}}
    check_size(content, json_bytes(content))
    with pytest.raises(ValueError, match=r"shorten method\.settings\.text, which has 502 of them"):
        check_size(content, json_bytes(content) - 1)


def test_without_a_largest_part_everything_is_to_be_shortened() -> None:
    content = dict.fromkeys("abc", "x" * 50)
    with pytest.raises(ValueError, match="shorten its values, or leave some out"):
        check_size(content, 100)


def test_what_is_nested_too_deeply_is_refused() -> None:
    content: dict[str, object] = {}
    for _ in range(100_000):
        content = {"a": content}
    with pytest.raises(ValueError, match="nested too deeply"):
        check_size(content, 100)
    while content:
        content = content.pop("a")  # type: ignore[assignment]

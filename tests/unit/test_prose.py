"""The check of docstrings knows a part of a sentence from a sentence."""

import pytest

from tools.budget import exceeded, lowered
from tools.prose import docstrings, fault_of


@pytest.mark.parametrize(
    "text",
    [
        "The plan of a run.",
        "Return the pods. By name.",
        "If the run ends, its pods stay.",
        "In a gang, all ranks are equal.",
        "What is left is removed.",
        "Whether the job has ended.",
        "Offers: what a profile has.",
    ],
)
def test_a_sentence_has_no_fault(text: str) -> None:
    assert fault_of(text) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Of the embeddings.", "is no sentence: 'Of the embeddings'"),
        ("By UID. The pods are sorted.", "is no sentence: 'By UID'"),
        ("The same of Jobs without\na Workload.", "is no sentence: 'The same of Jobs without a Workload'"),
        ("What a merge needs of the settings.", "is no sentence: 'What a merge needs of the settings'"),
        ("If no change helps: all together.", "is no sentence: 'If no change helps'"),
        ("The pods. Nobody reads them.", "says 'Nobody': 'The pods'"),
    ],
)
def test_a_part_of_a_sentence_and_an_avoided_word_are_faults(text: str, reason: str) -> None:
    assert fault_of(text) == reason


def test_the_string_below_an_assignment_is_a_docstring_and_a_value_is_none() -> None:
    assert list(docstrings('"""A module."""\nLIMIT = "value"\n"""A limit."""\n')) == [(1, "A module."), (3, "A limit.")]


def test_a_number_above_its_budget_is_named_and_what_has_no_budget_may_not_be() -> None:
    numbers = {"lines": {"one": 7, "two": 8, "new": 1}}
    assert exceeded(numbers, {"lines": {"one": 7, "two": 7}}) == [
        "[lines] two: 8, and budget.toml allows 7",
        "[lines] new: 1, and budget.toml allows 0",
    ]


def test_a_budget_is_lowered_and_never_raised() -> None:
    text = "[lines]\none = 1_200  # reason\ntwo = 7\n\n[prose]\none = 50\n"
    assert lowered(text, "lines", {"one": 1100, "two": 9}) == text.replace("1_200", "1_100")
    assert lowered(text, "prose", {"one": 0}) == text.replace("50", "0")

"""A rule counts as reproduced only by tests of tests/pitfalls that exist and look at the rule."""

import pytest

from finetune_job.rules.book import RULES
from tests.unit.finetune_job.texts_of_tests import texts_of

REPRODUCED = [(rule.id, test) for rule in RULES for test in rule.test.split()]


@pytest.mark.parametrize(("rule", "test"), REPRODUCED)
def test_a_rule_names_tests_that_are_about_it(rule: str, test: str):
    assert test.startswith("tests/pitfalls/")
    assert rule in texts_of(test)


def test_a_text_is_found_in_what_a_test_uses_and_not_beside_it():
    test = "tests/pitfalls/test_records.py::test_a_table_holds_no_chats"
    assert "csv-with-chat" in texts_of(test)
    assert "txt-without-text" not in texts_of(test)
    with pytest.raises(AssertionError, match="has no test_nothing"):
        texts_of("tests/pitfalls/test_records.py::test_nothing")

"""The summary of the suites tells the truth."""

from tests.suites import LIMIT_MINUTES, SUITES, Result, Suite, summary

SUITE = Suite("one", 2.0, (("true",),))


def test_a_failed_command_fails_the_run_and_is_named() -> None:
    text, held = summary([Result(SUITE, 1.0, ()), Result(SUITE, 1.0, ("pytest tests/unit",))])
    assert not held
    assert "FAILED: pytest tests/unit" in text


def test_minutes_stand_beside_their_budget() -> None:
    text, held = summary([Result(SUITE, 2.5, ())])
    assert held
    assert "2.5     2.0  passed  over budget" in text


def test_more_minutes_than_allowed_fail_the_run() -> None:
    _, held = summary([Result(SUITE, LIMIT_MINUTES + 1, ())])
    assert not held


def test_the_budgets_fit_into_the_limit() -> None:
    assert sum(suite.budget_minutes for suite in SUITES) <= LIMIT_MINUTES

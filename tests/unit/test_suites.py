"""The summary of the suites tells the truth."""

import sys

from tests.suites import LIMIT_PROCESSOR_MINUTES, SUITES, Result, Suite, run, summary

SUITE = Suite("one", 2.0, (("true",),))


def test_a_failed_command_fails_the_run_and_is_named() -> None:
    text, held = summary([Result(SUITE, 1.0, 1.0, ()), Result(SUITE, 1.0, 1.0, ("pytest tests/unit",))])
    assert not held
    assert "FAILED: pytest tests/unit" in text


def test_processor_minutes_are_shown_with_their_budget_and_a_slow_machine_fails_nothing() -> None:
    text, held = summary([Result(SUITE, 1000.0, 2.5, ())])
    assert held
    assert "1000.0        2.5     2.0  passed  over budget" in text
    text, _ = summary([Result(SUITE, 1000.0, 1.5, ())])
    assert "over budget" not in text


def test_every_command_runs_although_one_fails_and_its_processor_time_is_counted() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    result = run(Suite("two", 1.0, ((sys.executable, "-c", "raise SystemExit(3)"), (sys.executable, "-c", busy))))
    assert len(result.failed) == 1
    assert 0.3 / 60 <= result.processor_minutes < 1


def test_the_budgets_fit_into_the_limit() -> None:
    assert sum(suite.budget_minutes for suite in SUITES) <= LIMIT_PROCESSOR_MINUTES

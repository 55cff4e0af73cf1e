"""The table of what is retried, and its budgets."""

from __future__ import annotations

import pytest

from finetune_job.api.status import Restarts
from finetune_job.failures import FailureClass
from finetune_operator.decide.restart_policy import (
    LONGEST_BACKOFF_SECONDS,
    RETRY,
    UNCOUNTED_LIMIT,
    Retry,
    Verdict,
    after,
    backoff_seconds,
    verdict,
)


def test_every_class_has_its_row() -> None:
    assert set(RETRY) == set(FailureClass)


@pytest.mark.parametrize("failure", FailureClass)
def test_a_verdict_keeps_to_the_row_and_the_budgets(failure: FailureClass) -> None:
    fresh = verdict(failure, Restarts(), 3)
    spent = verdict(failure, Restarts(counted=3, uncounted=UNCOUNTED_LIMIT), 3)
    assert (fresh, spent) == {
        Retry.NEVER: (Verdict.STOP, Verdict.STOP),
        Retry.COUNTED: (Verdict.RESTART_COUNTED, Verdict.EXHAUSTED),
        Retry.UNCOUNTED: (Verdict.RESTART_UNCOUNTED, Verdict.EXHAUSTED),
    }[RETRY[failure]]


def test_one_budget_does_not_draw_on_the_other() -> None:
    assert verdict(FailureClass.INFRASTRUCTURE, Restarts(counted=99), 3) is Verdict.RESTART_UNCOUNTED
    assert verdict(FailureClass.INTERNAL, Restarts(uncounted=UNCOUNTED_LIMIT), 3) is Verdict.RESTART_COUNTED


def test_the_counters_follow_the_verdict() -> None:
    assert after(Verdict.RESTART_COUNTED, Restarts(counted=1, uncounted=2)) == Restarts(counted=2, uncounted=2)
    assert after(Verdict.RESTART_UNCOUNTED, Restarts(counted=1, uncounted=2)) == Restarts(counted=1, uncounted=3)


def test_the_pause_grows_to_its_limit_and_the_first_restart_has_none() -> None:
    pauses = [backoff_seconds(Restarts(counted=count)) for count in range(30)]
    assert pauses[:4] == [0, 0, 10, 20]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_BACKOFF_SECONDS

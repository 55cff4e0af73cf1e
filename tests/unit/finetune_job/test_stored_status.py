"""Status as other releases wrote it: what is missing, and what is not known here."""

from typing import Any

import pytest

from finetune_job.conditions import find_condition
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType
from finetune_job.stored_status import read_status

SINCE = "2026-01-01T12:00:00Z"


def condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": SINCE}


@pytest.mark.parametrize(
    ("prepared", "expected"),
    [
        (("Unknown", "Pending"), ("Unknown", "Pending")),
        (("Unknown", "WaitingForPods"), ("True", "Skipped")),
        (("True", "Completed"), ("True", "Skipped")),
        (("False", "PreflightRefused"), ("True", "Skipped")),
    ],
)
def test_where_nothing_could_be_fetched_fetching_is_skipped_once_the_plan_is_stored(
    prepared: tuple[str, str], expected: tuple[str, str]
) -> None:
    status = read_status({"conditions": [condition("Validated", "True", "Accepted"), condition("Prepared", *prepared)]})
    fetched = find_condition(status.conditions, ConditionType.FETCHED)
    assert fetched is not None
    assert (fetched.status, fetched.reason, fetched.last_transition_time) == (*expected, SINCE)


def test_a_release_that_fetches_is_read_as_it_is() -> None:
    written = [condition("Fetched", "False", "FetchRefused"), condition("Prepared", "Unknown", "Pending")]
    assert [(one.type, one.status) for one in read_status({"conditions": written}).conditions] == [
        (ConditionType.FETCHED, "False"),
        (ConditionType.PREPARED, "Unknown"),
    ]


def test_an_attempt_without_a_role_is_one_of_the_gang() -> None:
    written = [{"number": 3, "outcome": "Failed", "failure": "Collective"}, {"number": 4, "outcome": "Resized", "nodes": 2}]
    status = read_status({"attempts": written})
    first, second = status.attempts
    assert (first.role, first.number, first.failure) == (Role.TRAIN, 3, FailureClass.COLLECTIVE)
    assert (second.outcome, second.nodes) == ("Resized", 2)
    assert status.role_restarts.merge.counted == 0


def test_words_of_a_later_release_do_not_hide_the_job() -> None:
    status = read_status(
        {
            "novelty": {"a": 1},
            "conditions": [condition("Novel", "True", "New"), condition("Trained", "True", "Completed")],
            "attempts": [
                {"role": "evaluate", "number": 0},
                {
                    "role": "train",
                    "number": 1,
                    "outcome": "Paused",
                    "failure": "Novel",
                    "evidence": [{"pod": "a", "failure": "Novel", "message": "said"}],
                },
            ],
        }
    )
    assert [one.type for one in status.conditions] == [ConditionType.TRAINED]
    (attempt,) = status.attempts
    assert (attempt.number, attempt.outcome, attempt.failure) == (1, "Failed", FailureClass.UNKNOWN)
    assert [(one.failure, one.message) for one in attempt.evidence] == [(FailureClass.UNKNOWN, "said")]


@pytest.mark.parametrize("content", [None, {}])
def test_no_status_is_a_new_job(content: dict[str, Any] | None) -> None:
    assert read_status(content).conditions == []

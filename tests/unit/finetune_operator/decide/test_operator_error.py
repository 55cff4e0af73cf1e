"""What a job says while the passes over it fail, and how that is taken back."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import find_condition, initial_conditions, with_condition
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.operator_error import is_reported, ready_without_error, with_error_kept, with_operator_error
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.observed import JobView

THEN, NOW = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"
MOMENT = datetime(2026, 1, 1, 1, tzinfo=UTC)
TOLD = "The operator cannot work on this job, and tries again every minute: 403"


def stored(kind: str, status: str, reason: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": THEN, **more}


def status_with(*said: tuple[ConditionType, bool | None, Reason]) -> FineTuneJobStatus:
    conditions = initial_conditions(generation=1, now=THEN)
    for kind, value, reason in said:
        conditions = with_condition(conditions, kind, value, reason, f"of {kind}", generation=1, now=THEN)
    return FineTuneJobStatus(conditions=conditions)


def test_a_job_without_status_says_that_it_was_seen_and_what_is_wrong() -> None:
    patch = with_operator_error({}, 3, NOW, "403")
    assert [one["type"] for one in patch["conditions"]] == [str(kind) for kind in ConditionType]
    ready = next(one for one in patch["conditions"] if one["type"] == "Ready")
    expected = {"type": "Ready", "status": "False", "reason": "OperatorError", "message": TOLD, "observedGeneration": 3}
    assert ready == expected | {"lastTransitionTime": NOW}
    assert {(one["status"], one["reason"]) for one in patch["conditions"] if one is not ready} == {("Unknown", "NotObserved")}


def test_nothing_else_of_the_status_is_touched_not_even_what_this_release_does_not_understand() -> None:
    later = stored("Blessed", "True", "ByALaterRelease", since=7)
    prepared = stored("Prepared", "True", "Completed")
    status = {"attempt": 4, "conditions": [prepared, stored("Ready", "True", "Running"), later]}
    patch = with_operator_error(status, 1, NOW, "403")
    assert list(patch) == ["conditions"]
    before, ready, after = patch["conditions"]
    assert (before, after, ready["reason"], ready["lastTransitionTime"]) == (prepared, later, "OperatorError", NOW)
    assert status["conditions"][1]["reason"] == "Running", "the cache's own is not changed"


def test_a_status_without_ready_gets_one_and_one_that_was_false_keeps_its_time() -> None:
    patch = with_operator_error({"conditions": [stored("Stalled", "False", "Healthy")]}, 1, NOW, "403")
    assert [one["type"] for one in patch["conditions"]] == ["Stalled", "Ready"]
    patch = with_operator_error({"conditions": [stored("Ready", "False", "Queued")]}, 1, NOW, "403")
    assert patch["conditions"][0]["lastTransitionTime"] == THEN


@pytest.mark.parametrize("said", [stored("Ready", "False", "OperatorError", message="500"), stored("Finished", "True", "Failed")])
def test_it_is_said_once_and_not_of_a_job_that_has_ended(said: dict[str, Any]) -> None:
    assert with_operator_error({"conditions": [said]}, 1, NOW, "403") is None


def test_an_endless_message_is_cut() -> None:
    patch = with_operator_error({"conditions": [stored("Ready", "True", "Running")]}, 1, NOW, "x" * 100_000)
    assert patch is not None
    FineTuneJobStatus.model_validate(patch)


def test_a_pass_that_is_not_known_to_end_well_writes_everything_but_ready() -> None:
    before = status_with((ConditionType.READY, False, Reason.OPERATOR_ERROR))
    running = status_with((ConditionType.READY, True, Reason.RUNNING), (ConditionType.PREPARED, True, Reason.COMPLETED))
    kept = with_error_kept(before, running)
    assert is_reported(kept)
    prepared = find_condition(kept.conditions, ConditionType.PREPARED)
    assert prepared.status == "True"
    assert with_error_kept(before, status_with((ConditionType.READY, True, Reason.RUNNING))) is None, "nothing else is news"
    assert with_error_kept(before, None) is None
    ended = status_with((ConditionType.FINISHED, True, Reason.CANCELLED))
    assert with_error_kept(before, ended) is ended
    assert with_error_kept(running, running) is running


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((), (None, "NotObserved", "")),
        (((ConditionType.STALLED, True, Reason.PLAN_LOST),), (False, "PlanLost", "of Stalled")),
        (((ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER),), (False, "SuspendedByUser", "of Suspended")),
        (
            ((ConditionType.VALIDATED, True, Reason.ACCEPTED), (ConditionType.FETCHED, None, Reason.BACKING_OFF)),
            (False, "BackingOff", "of Fetched"),
        ),
        (((ConditionType.VALIDATED, True, Reason.ACCEPTED),), (None, "NotObserved", "")),
        (((ConditionType.SUCCEEDED, False, Reason.CANCELLED),), (False, "Cancelled", "")),
    ],
)
def test_a_pass_that_does_not_set_ready_derives_it_from_other_conditions(
    said: tuple[tuple[ConditionType, bool | None, Reason], ...], expected: tuple[bool | None, str, str]
) -> None:
    status = status_with((ConditionType.READY, False, Reason.OPERATOR_ERROR), *said)
    assert ready_without_error(status.conditions) == expected
    view = JobView("team", "tune", "uid", 1, "1", spec=None, status=status)
    written = PassResult(view, MOMENT).actions().status
    ready = find_condition(written.conditions, ConditionType.READY)
    assert (ready.reason, ready.message) == expected[1:]


def test_ready_is_as_the_pass_sets_it() -> None:
    status = status_with((ConditionType.READY, False, Reason.OPERATOR_ERROR))
    result = PassResult(replace(JobView("team", "tune", "uid", 1, "1", spec=None), status=status), MOMENT)
    result.condition(ConditionType.READY, True, Reason.RUNNING)
    written = result.actions().status
    ready = find_condition(written.conditions, ConditionType.READY)
    assert ready.reason == Reason.RUNNING

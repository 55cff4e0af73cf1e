"""Conditions and the phase derived from them."""

import pytest

from finetune_job.api.status import Condition
from finetune_job.conditions import find_condition, initial_conditions, is_condition_true, job_phase, with_condition
from finetune_job.reasons import ConditionType, Reason
from tests.support.cases import table

T0, T1 = "2030-01-01T00:00:00Z", "2030-01-01T00:01:00Z"


def test_all_conditions_are_unknown_at_first_sight() -> None:
    conditions = initial_conditions(generation=3, now=T0)
    assert [condition.type for condition in conditions] == list(ConditionType)
    assert {(condition.status, condition.reason, condition.observed_generation) for condition in conditions} == {
        ("Unknown", "NotObserved", 3)
    }


def test_the_transition_time_moves_only_when_the_status_flips() -> None:
    def at(conditions: list[Condition], status: bool | None, message: str, now: str) -> list[Condition]:
        return with_condition(conditions, ConditionType.TRAINED, status, Reason.RUNNING, message, generation=1, now=now)

    first = at(initial_conditions(generation=1, now=T0), False, "step 1", T0)
    second = at(first, False, "step 2", T1)
    third = at(second, True, "done", T1)
    times = [
        found.last_transition_time
        for found in (find_condition(c, ConditionType.TRAINED) for c in (first, second, third))
        if found
    ]
    assert times == [T0, T0, T1]
    assert len(third) == len(first)


@pytest.mark.parametrize(("true", "reasons", "expected"), table(__file__, "test_the_phase_says_where_a_job_is"))
def test_the_phase_says_where_a_job_is(true: list[str], reasons: dict[str, str], expected: str) -> None:
    conditions = initial_conditions(generation=1, now=T0)
    for kind in ConditionType:
        status = kind.value in true
        reason = Reason(reasons.get(kind.value, "Running"))
        conditions = with_condition(conditions, kind, status, reason, "", generation=1, now=T0)
        assert is_condition_true(conditions, kind) is status
    assert job_phase(conditions) == expected


def test_a_reason_of_another_release_is_kept_as_it_is() -> None:
    other = Reason("InventedLater")
    assert other == "InventedLater"
    assert f"{other}" == "InventedLater"
    assert other not in list(Reason)
    before = initial_conditions(generation=1, now=T0)
    conditions = with_condition(before, ConditionType.TRAINED, False, other, "", generation=1, now=T0)
    assert [condition.reason for condition in conditions if condition.type == ConditionType.TRAINED] == ["InventedLater"]

"""What follows each class of failure. The expectations are written by hand: they are the promise, not a copy of the table."""

import pytest

from finetune_job.api.status import Restarts
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_operator.decide.failures.restart_policy import (
    POLICY,
    counters_after,
    pause_seconds,
    restart_decision,
    with_progress,
)
from finetune_operator.decide.failures.restart_policy import RestartDecision as Decision
from finetune_operator.decide.seen.times import timestamp
from tests.support.builders import T0
from tests.support.builders import after as later
from tests.support.cases import table

NEVER = {
    "UserConfig",
    "UserData",
    "UserModel",
    "NonFinite",
    "DeviceOutOfMemory",
    "HostOutOfMemory",
    "VerificationFailed",
    "PlanMismatch",
    "DestinationRefused",
}
COUNTED = {"Collective", "Internal", "Stalled", "CheckpointInvalid", "DiskFull"}
UNCOUNTED = table(__file__, "UNCOUNTED")
"""With how many restarts without progress are allowed; None: limited by time."""
OUTSIDE = {*UNCOUNTED, "DiskFull", "PlanMismatch"}
"""What a training that was given up for it is stalled by, never failed."""


def test_every_class_is_in_one_of_the_three() -> None:
    assert NEVER | COUNTED | set(UNCOUNTED) == {str(failure) for failure in FailureClass}


@pytest.mark.parametrize("failure", sorted(NEVER))
def test_what_would_fail_again_is_never_tried_again(failure: str) -> None:
    assert restart_decision(FailureClass(failure), Restarts(), 100, T0) is Decision.STOP


@pytest.mark.parametrize("failure", sorted(COUNTED))
def test_what_the_job_may_have_caused_is_counted_within_its_budget(failure: str) -> None:
    assert restart_decision(FailureClass(failure), Restarts(counted=2, uncounted=1000), 3, T0) is Decision.RESTART_COUNTED
    assert restart_decision(FailureClass(failure), Restarts(counted=3), 3, T0) is Decision.EXHAUSTED
    assert restart_decision(FailureClass(failure), Restarts(), 0, T0) is Decision.EXHAUSTED


@pytest.mark.parametrize("failure", sorted(UNCOUNTED))
def test_what_others_caused_costs_the_job_nothing(failure: str) -> None:
    assert restart_decision(FailureClass(failure), Restarts(counted=3), 3, T0) is Decision.RESTART_UNCOUNTED
    assert restart_decision(FailureClass(failure), Restarts(uncounted=1000), 0, T0) is Decision.RESTART_UNCOUNTED, (
        "with progress in between"
    )
    most = UNCOUNTED[failure]
    if most is not None:
        assert restart_decision(FailureClass(failure), Restarts(in_a_row=most - 1), 0, T0) is Decision.RESTART_UNCOUNTED
        assert restart_decision(FailureClass(failure), Restarts(in_a_row=most), 0, T0) is Decision.EXHAUSTED


@pytest.mark.parametrize("failure", ["SourceUnavailable", "DestinationUnavailable"])
def test_who_does_not_answer_is_asked_for_a_day(failure: str) -> None:
    restarts = Restarts(in_a_row=10_000, in_a_row_since=timestamp(T0))
    assert restart_decision(FailureClass(failure), restarts, 0, later(86_399)) is Decision.RESTART_UNCOUNTED
    assert restart_decision(FailureClass(failure), restarts, 0, later(86_400)) is Decision.EXHAUSTED
    assert (
        restart_decision(FailureClass(failure), Restarts(in_a_row_since=timestamp(T0)), 0, later(10**7))
        is Decision.RESTART_UNCOUNTED
    )


@pytest.mark.parametrize("failure", sorted(FailureClass))
def test_causes_outside_the_job_never_fail_what_was_trained(failure: FailureClass) -> None:
    assert POLICY[failure].outside is (str(failure) in OUTSIDE)


@pytest.mark.parametrize(
    ("decision", "counted", "uncounted", "in_a_row"),
    [
        (Decision.RESTART_COUNTED, 2, 5, 4),
        (Decision.RESTART_UNCOUNTED, 1, 6, 4),
        (Decision.STOP, 1, 5, 3),
        (Decision.EXHAUSTED, 1, 5, 3),
    ],
)
def test_the_counters_follow_the_verdict(decision: Decision, counted: int, uncounted: int, in_a_row: int) -> None:
    before = Restarts(counted=1, uncounted=5, in_a_row=3, in_a_row_since="2026-01-01T00:00:00Z")
    found = counters_after(decision, FailureClass.INTERNAL, before, T0)
    assert (found.counted, found.uncounted, found.in_a_row) == (counted, uncounted, in_a_row)
    assert found.in_a_row_since == "2026-01-01T00:00:00Z"


def test_a_row_begins_with_its_first_failure() -> None:
    assert (
        counters_after(Decision.RESTART_UNCOUNTED, FailureClass.PREEMPTED, Restarts(), T0).in_a_row_since
        == "2026-01-01T12:00:00Z"
    )


def test_a_newer_checkpoint_ends_the_row_and_keeps_the_budget() -> None:
    before = Restarts(counted=2, uncounted=49, in_a_row=49, in_a_row_since="2026-01-01T00:00:00Z", at_checkpoint=100)
    assert with_progress(before, 100) == before
    assert with_progress(before, 90) == before
    assert with_progress(before, None) == before
    found = with_progress(before, 101)
    assert (found.in_a_row, found.in_a_row_since, found.at_checkpoint) == (0, "", 101)
    assert (found.counted, found.uncounted) == (2, 49)


@pytest.mark.parametrize(
    ("failure", "role", "expected"),
    [
        ("Infrastructure", Role.TRAIN, [0, 10, 20, 40, 80, 160, 300, 300]),
        ("Infrastructure", Role.MERGE, [10, 20, 40, 80, 160, 300, 300, 300]),
        ("DiskFull", Role.MERGE, [60, 120, 240, 300, 300, 300, 300, 300]),
        ("DiskFull", Role.TRAIN, [60, 120, 240, 300, 300, 300, 300, 300]),
        ("SourceUnavailable", Role.FETCH, [30, 60, 120, 240, 300, 300, 300, 300]),
        ("ImagePull", Role.PUBLISH, [10, 20, 40, 80, 160, 320, 640, 1280]),
    ],
)
def test_pauses_double_up_to_their_limit_and_only_a_gangs_first_restart_has_none(
    failure: str, role: Role, expected: list[float]
) -> None:
    # No restart at all: of a status that somebody has edited.
    for number, seconds in [(0, expected[0]), *enumerate(expected, start=1)]:
        pause = pause_seconds(FailureClass(failure), Restarts(in_a_row=number), role, "uid")
        assert 0.8 * seconds <= pause <= seconds
    assert pause_seconds(FailureClass(failure), Restarts(in_a_row=10**6), role, "uid") <= 3600


def test_jobs_that_failed_together_do_not_come_back_together_but_each_knows_its_time() -> None:
    pauses = {pause_seconds(FailureClass.INFRASTRUCTURE, Restarts(in_a_row=4), Role.MERGE, f"uid-{n}") for n in range(50)}
    assert len(pauses) == 50
    again = pause_seconds(FailureClass.INFRASTRUCTURE, Restarts(in_a_row=4), Role.MERGE, "uid-7")
    assert again in pauses


def restarted(*failures: str, seconds: float = 0.0, before: Restarts | None = None) -> Restarts:
    """After these failures one after the other, each of which was followed by a restart."""
    found = before or Restarts()
    for failure in map(FailureClass, failures):
        decision = restart_decision(failure, found, 1000, later(seconds))
        assert decision.restarts, failure
        found = counters_after(decision, failure, found, later(seconds))
    return found


def test_a_class_is_given_up_for_its_own_restarts_and_for_no_others() -> None:
    found = restarted(*["Preempted"] * 5, *["Internal"] * 5)
    found = restarted(*["DeviceFault"] * 5, before=found)
    assert restart_decision(FailureClass.DEVICE_FAULT, found, 0, T0) is Decision.EXHAUSTED
    assert restart_decision(FailureClass.PREEMPTED, found, 0, T0) is Decision.RESTART_UNCOUNTED
    assert restart_decision(FailureClass.UNKNOWN, found, 0, T0) is Decision.RESTART_UNCOUNTED
    assert found.in_a_row == 15, "the pause grows with all of them"


def test_another_class_in_between_begins_no_new_row() -> None:
    found = restarted(*["DeviceFault", "Preempted"] * 5)
    assert restart_decision(FailureClass.DEVICE_FAULT, found, 0, T0) is Decision.EXHAUSTED


def test_the_day_of_a_source_begins_with_its_own_first_failure() -> None:
    found = restarted("Preempted", "Internal")
    found = restarted("SourceUnavailable", seconds=25 * 3600, before=found)
    assert restart_decision(FailureClass.SOURCE_UNAVAILABLE, found, 0, later(49 * 3600 - 1)) is Decision.RESTART_UNCOUNTED
    assert restart_decision(FailureClass.SOURCE_UNAVAILABLE, found, 0, later(49 * 3600)) is Decision.EXHAUSTED


def test_an_eviction_after_many_tries_of_a_source_is_no_last_straw() -> None:
    found = restarted(*["SourceUnavailable"] * 280)
    assert restart_decision(FailureClass.INFRASTRUCTURE, found, 0, T0) is Decision.RESTART_UNCOUNTED


def test_classes_that_take_turns_are_given_up_after_a_hundred_in_all() -> None:
    turns = ["Preempted", "Infrastructure", "NodeLost", "Rejected"] * 25
    found = restarted(*turns, "SourceUnavailable", "Internal")
    assert [restart_decision(FailureClass(one), found, 9, T0) for one in ("Preempted", "DeviceFault")] == [Decision.EXHAUSTED] * 2
    assert restart_decision(FailureClass.SOURCE_UNAVAILABLE, found, 9, T0) is Decision.RESTART_UNCOUNTED
    assert restart_decision(FailureClass.INTERNAL, found, 9, T0) is Decision.RESTART_COUNTED
    assert restarted(*turns[:-1], "NodeLost").uncounted == 100


def test_a_row_of_an_earlier_release_continues_as_that_of_the_next_class() -> None:
    found = restarted("DeviceFault", before=Restarts(uncounted=3, in_a_row=3, in_a_row_since="2026-01-01T00:00:00Z"))
    assert [(row.failure, row.restarts, row.since) for row in found.rows] == [("DeviceFault", 4, "2026-01-01T00:00:00Z")]


def test_progress_resets_all_rows() -> None:
    found = with_progress(restarted(*["DeviceFault"] * 5), 7)
    assert (found.rows, found.in_a_row, found.in_a_row_since) == ([], 0, "")
    assert restart_decision(FailureClass.DEVICE_FAULT, found, 0, T0) is Decision.RESTART_UNCOUNTED

"""How a Job stands that a queue suspends and lets go on: the pods of its earlier life say nothing of this one."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.names import Role
from finetune_operator.decide.failures.job_state import JobState, State, job_state, late_to_start
from tests.support.builders import T0, ObservedBuilder, a_job, after, envelope, observing


def resumed() -> ObservedBuilder:
    """Suspended 200 s ago, which ended its pod, and let go on 100 s later."""
    seen = observing(a_job()).prepared().batch_job(start_time=after(-100))
    report = envelope(FailureClass.PREEMPTED)
    exit_code = EXIT_CODES[FailureClass.PREEMPTED]
    return seen.pod(0, exit_code=exit_code, termination_message=report, deletion_requested=after(-200), gone=True)


def job_state_of(seen: ObservedBuilder) -> JobState:
    return job_state(seen.build(), Role.TRAIN, 0, 1, was_seen=True, now=T0)


def test_a_job_that_continues_waits_for_its_new_pods() -> None:
    found = job_state_of(resumed())
    assert (found.state, found.pods) == (State.WAITING, ())


@pytest.mark.parametrize("ending", [{"gone": True}, {"gone": False}])
def test_until_the_job_controller_starts_it_again_the_pods_of_its_earlier_life_say_nothing(ending: dict[str, bool]) -> None:
    seen = resumed()
    (earlier,) = seen.pods
    found = job_state_of(seen.but(pods=(replace(earlier, **ending),)).batch_job(start_time=None))
    assert (found.state, found.pods) == (State.WAITING, ())


def test_a_pod_that_is_gone_without_a_report_belongs_to_the_life_before_the_start() -> None:
    seen = observing(a_job()).prepared().batch_job(start_time=None).pod(0, phase="Running", gone=True)
    assert job_state_of(seen).pods == ()


def test_pods_that_are_made_before_the_start_is_written_belong_to_this_life() -> None:
    seen = observing(a_job()).prepared().batch_job(start_time=None).pod(0)
    found = job_state_of(seen)
    assert (found.state, found.pods) == (State.WAITING, seen.pods)


def test_a_pod_that_was_deleted_after_the_start_belongs_to_this_life() -> None:
    seen = resumed()
    (pod,) = seen.pods
    found = job_state_of(seen.batch_job(start_time=after(-300)))
    assert found.pods == (pod,)


def test_what_ended_the_earlier_life_is_not_the_cause_of_a_failure_in_this_one() -> None:
    seen = resumed()
    (earlier,) = seen.pods
    now = seen.but(pods=()).failed_pod(0, FailureClass.INTERNAL).batch_job("FailureTarget", start_time=after(-100))
    found = job_state_of(now.but(pods=(earlier, *now.pods)))
    assert (found.state, found.failure.failure) == (State.FAILED, FailureClass.INTERNAL)
    assert found.pods == now.pods


@pytest.mark.parametrize("condition", ["Failed", "FailureTarget"])
def test_a_job_that_failed_is_failed_although_a_queue_has_suspended_it(condition: str) -> None:
    """A queue that takes its room back sets `suspend` on it. Nobody would ever let it go on: it has ended."""
    seen = observing(a_job()).prepared().failed_pod(0, FailureClass.INTERNAL).batch_job(condition, suspended=True)
    found = job_state_of(seen)
    assert (found.state, found.failure.failure) == (State.FAILED, FailureClass.INTERNAL)


def test_a_job_that_has_not_failed_waits_in_its_queue() -> None:
    found = job_state_of(observing(a_job()).prepared().batch_job(suspended=True))
    assert found.state is State.QUEUED
    assert found.pending.is_capacity


@pytest.mark.parametrize(
    ("seconds", "pod", "job", "run", "is_late"),
    [
        (300, {}, {}, {}, True),
        (301, {}, {}, {}, False),
        (300, {}, {"parallelism": 2}, {}, True),
        (300, {"phase": "Running", "started": after(-1)}, {}, {}, False),
        (300, {"phase": "Running", "started": after(-1)}, {"parallelism": 2}, {}, True),
        (300, {"unschedulable": "0/3 nodes"}, {}, {}, False),
        (300, {}, {"suspended": True}, {}, False),
        (300, {}, {"deleting": True}, {}, False),
        (300, {}, {}, {"suspend": True}, False),
    ],
)
def test_a_job_is_late_if_pods_with_a_node_have_not_started_in_time(
    seconds: int, pod: dict[str, Any], job: dict[str, Any], run: dict[str, Any], is_late: bool
) -> None:
    seen = observing(a_job().run(startupDeadlineSeconds=seconds, **run)).prepared().batch_job(**job).pod(0, **pod).build()
    assert (late_to_start(seen, T0) is not None) == is_late

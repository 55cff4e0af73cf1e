"""Accounts of jobs: each second and each end once, whatever is computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_job.api.status import Attempt, FineTuneJobStatus, ProgressStatus
from finetune_job.conditions import with_condition
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.account import (
    GONE,
    Ended,
    JobAccount,
    closed_account,
    confirmed_by,
    is_news,
    restart_key,
    with_checkpoint,
    with_decision,
    with_pods,
)
from finetune_operator.decide.children_seen import ContainerEnd, PodView
from finetune_operator.decide.phases import phase_seconds
from finetune_operator.decide.times import timestamp
from finetune_operator.decide.usage_labels import JobLabels
from finetune_operator.decide.usage_totals import DurationCounts, UsageTotals
from tests.support.builders import T0, a_job, after, observing

LABELS = JobLabels("team", "team", "LoRA", "gpus", "default", "H100")
START = T0.timestamp()


def account(**fields: Any) -> JobAccount:
    return JobAccount(labels=LABELS, gpus=8, at=START, **fields)


def pod(scheduled: float, started: float | None = None, finished: float | None = None, **fields: Any) -> PodView:
    phase = "Pending" if started is None else "Running" if finished is None else "Succeeded"
    view = PodView("tune-train-0-0", "uid", Role.TRAIN, 0, created=T0, phase=phase, scheduled=after(scheduled))
    started_at, finished_at = (None if moment is None else after(moment) for moment in (started, finished))
    return replace(view, **{"started": started_at, "finished": finished_at, **fields})


def counted(pods: list[PodView], *moments: float, attempt: int = 0) -> JobAccount:
    found = account()
    for moment in moments:
        found = with_pods(found, pods, attempt, START + moment)
    return found


def test_seconds_are_told_apart_and_added_once() -> None:
    pods = [pod(10, 40, 100), pod(10, 50)]
    at_once = counted(pods, 200)
    assert at_once.gpu_seconds == {"waiting": 8 * (30 + 40)}
    assert at_once.open_seconds == 8 * (60 + 150)
    in_steps = counted(pods, 5, 45, 45, 44, 99, 150, 200)
    assert (in_steps.gpu_seconds, in_steps.open_seconds) == (at_once.gpu_seconds, at_once.open_seconds)
    # Nothing of the pods of other roles, and of those that have no node.
    others = [pod(10, 40, 100, role=Role.MERGE), replace(pod(10), scheduled=None)]
    assert counted(others, 200) == account()
    # A pod that has not started waits, and nothing else may have happened since.
    assert counted([pod(10)], 60).gpu_seconds == {"waiting": 400}
    assert with_pods(account().model_copy(update={"at": START + 50}), [pod(10, 40)], 1, START + 60).gpu_seconds == {"lost": 80}
    # What an earlier attempt still holds is lost.
    assert counted([pod(10, 40)], 60, attempt=1).gpu_seconds == {"waiting": 240, "lost": 160}
    # A job without GPUs has nothing to count, and so nothing to write.
    without = account().model_copy(update={"gpus": 0})
    assert with_pods(without, [pod(10, 40)], 0, START + 60) is without


def test_a_container_that_was_started_again_trains_from_the_first_start_on() -> None:
    again = pod(10, 100, restarts=1, earlier=ContainerEnd(started=after(40), finished=after(95)))
    found = counted([again], 150)
    assert (found.gpu_seconds, found.open_seconds) == ({"waiting": 8 * 30}, 8 * 110)


def test_a_pod_that_went_without_a_word_held_its_gpus_until_it_was_due() -> None:
    gone = pod(0, 10, gone=True, phase="Running", deletion_due=after(50))
    assert counted([gone], 30, 200).open_seconds == 8 * 40
    assert counted([replace(gone, deletion_due=None)], 30, 200).open_seconds == 0


def test_a_checkpoint_keeps_what_was_trained_before_it() -> None:
    before = counted([pod(0, 0)], 100)
    kept = with_checkpoint(before, 10)
    assert (kept.gpu_seconds, kept.open_seconds) == ({"productive": 800}, 0)
    later = with_pods(kept, [pod(0, 0)], 0, START + 150)
    assert with_checkpoint(later, 10).open_seconds == 400, "the same checkpoint keeps no more"
    assert with_checkpoint(later, 20).gpu_seconds == {"productive": 1200}
    assert closed_account(later).gpu_seconds == {"productive": 800, "lost": 400}


def decided(before: FineTuneJobStatus, after_: FineTuneJobStatus) -> JobAccount:
    return with_decision(account(open_seconds=80.0), before, after_, None)


def test_a_restart_counts_once_the_status_tells_of_it_or_the_job_is_gone() -> None:
    before = observing(a_job()).training().status
    failed = before.attempts[0].model_copy(update={"outcome": "Failed", "failure": FailureClass.COLLECTIVE, "counted": True})
    told = before.model_copy(update={"attempts": [failed], "attempt": 1})
    assert is_news(before, told)
    found = decided(before, told)
    assert found.pending == {"train/0": "Collective|true"}
    assert found.gpu_seconds == {"lost": 80.0}
    assert UsageTotals().plus(found, confirmed_by(before)).restarts == {}
    for confirmed in (confirmed_by(told), GONE):
        assert UsageTotals().plus(found, confirmed).restarts == {"Collective|true": 1}
    # The write failed, and the next pass decides otherwise.
    another = told.model_copy(
        update={"attempts": [failed.model_copy(update={"failure": FailureClass.UNKNOWN, "counted": False})]}
    )
    assert with_decision(found, before, another, None).pending == {"train/0": "Unknown|false"}
    # It was written, and what follows keeps it.
    running = told.model_copy(update={"attempts": [failed, Attempt(number=1, start_time=timestamp(T0))]})
    again = running.attempts[1].model_copy(update={"outcome": "Failed", "failure": FailureClass.STALLED, "counted": True})
    following = with_decision(found, running, running.model_copy(update={"attempts": [failed, again], "attempt": 2}), None)
    assert following.restarts == {"Collective|true": 1}
    assert following.pending == {"train/1": "Stalled|true"}


@pytest.mark.parametrize("number", [-(2**62), -1, 0, 999_999_999, 10**9, 2**63 - 2])
@pytest.mark.parametrize("field", ["attempt", "publish_attempt"])
def test_an_account_can_be_read_again_whatever_number_somebody_wrote_into_the_status(number: int, field: str) -> None:
    """What is on record is one object: an account in it that cannot be read would take those of all jobs with it."""
    role = Role.TRAIN if field == "attempt" else Role.PUBLISH
    failed = Attempt(role=role, number=number, outcome="Failed", failure=FailureClass.NODE_LOST)
    before = FineTuneJobStatus(**{field: number})
    after_it = before.model_copy(update={field: number + 1, "attempts": [failed]})
    pending = with_decision(account(), before, after_it, T0)
    assert pending.pending == {f"{role}/{number}": "NodeLost|false"}
    assert JobAccount.model_validate_json(pending.model_dump_json()) == pending
    # It counts once the status says so.
    assert UsageTotals().plus(pending, confirmed_by(before)).restarts == {}
    assert UsageTotals().plus(pending, confirmed_by(after_it)).restarts == {"NodeLost|false": 1}


def test_a_restart_that_is_told_leaves_that_of_another_role_pending() -> None:
    found = account(pending={"train/0": "NodeLost|false", "publish/0": "Internal|true"})
    told = FineTuneJobStatus(attempt=1)
    assert with_decision(found, told, told, None).restarts == {"NodeLost|false": 1}
    following = with_decision(found, told, told.model_copy(update={"publish_attempt": 1}), None)
    assert UsageTotals().plus(found, confirmed_by(told)).restarts == {"NodeLost|false": 1}
    assert (following.restarts, following.pending) == ({"NodeLost|false": 1}, {})
    assert restart_key(Attempt(number=0, outcome="Failed")) == "Unknown|false"


def test_a_result_is_news_once_and_once_more_when_nothing_of_the_job_runs() -> None:
    before = observing(a_job()).training().status

    def with_(status: FineTuneJobStatus, kind: ConditionType) -> FineTuneJobStatus:
        conditions = with_condition(status.conditions, kind, True, Reason.COMPLETED, "", generation=1, now="")
        return status.model_copy(update={"conditions": conditions})

    succeeded = with_(before, ConditionType.SUCCEEDED)
    finished = with_(succeeded, ConditionType.FINISHED)
    assert [is_news(*each) for each in ((before, succeeded), (succeeded, succeeded), (succeeded, finished))] == [
        True,
        False,
        True,
    ]
    ended = Ended(result="Succeeded", reason="Completed", seconds={"queue": 40.0})
    totals = UsageTotals().plus(account(ended=ended), confirmed_by(succeeded))
    assert (totals.ended, totals.durations) == ({"Succeeded|Completed": 1}, {"queue": DurationCounts().plus(40.0)})
    assert UsageTotals().plus(account(ended=ended), confirmed_by(before)).durations == {}


def test_what_sigterm_suspension_and_success_end_is_kept_and_no_restart() -> None:
    before = observing(a_job()).training().status
    for outcome, failure in (
        ("Succeeded", None),
        ("Suspended", None),
        ("Resized", None),
        ("Failed", FailureClass.PREEMPTED),
    ):
        closed = before.attempts[0].model_copy(update={"outcome": outcome, "failure": failure})
        found = decided(before, before.model_copy(update={"attempts": [closed], "attempt": 1}))
        assert found.gpu_seconds == {"productive": 80.0}
        assert len(found.pending) == (failure is not None)


def test_what_is_trained_stays_open_until_its_attempt_or_the_job_ends() -> None:
    before = observing(a_job()).training().status
    other = before.model_copy(update={"merge_attempt": 1, "attempts": [*before.attempts, Attempt(role=Role.MERGE, number=0)]})
    opened = before.model_copy(update={"attempts": [Attempt(number=0, start_time=timestamp(T0))]})
    unopened = before.model_copy(update={"attempts": []})
    for was, told in ((before, other), (before, before), (unopened, opened)):
        found = decided(was, told)
        assert (found.open_seconds, found.gpu_seconds, found.pending) == (80.0, {}, {})
    # Its attempt has ended before, and its pods ran on until the job was cancelled.
    failed = before.attempts[0].model_copy(update={"outcome": "Failed", "failure": FailureClass.COLLECTIVE})
    stopped = before.model_copy(update={"attempts": [failed]})
    conditions = with_condition(stopped.conditions, ConditionType.SUCCEEDED, False, Reason.CANCELLED, "", generation=1, now="")
    found = decided(stopped, stopped.model_copy(update={"conditions": conditions}))
    assert (found.open_seconds, found.gpu_seconds) == (0.0, {"lost": 80.0})


def test_the_user_retry_of_a_stopped_role_is_no_restart() -> None:
    stopped = Attempt(number=0, outcome="Failed", failure=FailureClass.DISK_FULL)
    before = observing(a_job()).training().status.model_copy(update={"attempts": [stopped]})
    after_ = before.model_copy(update={"attempt": 1, "retry_handled": 1})
    assert not is_news(before, after_)
    assert decided(before, after_).pending == {}


def with_end(status: FineTuneJobStatus, succeeded: bool, reason: Reason) -> FineTuneJobStatus:
    conditions = with_condition(
        status.conditions, ConditionType.SUCCEEDED, succeeded, reason, "", generation=1, now=timestamp(T0)
    )
    return status.model_copy(update={"conditions": conditions})


def test_a_result_counts_once_with_the_reason_that_the_status_gives() -> None:
    before = observing(a_job()).training().status
    failed = decided(before, with_end(before, False, Reason.VERIFICATION_FAILED))
    assert UsageTotals().plus(failed, confirmed_by(before)).ended == {}
    cancelled = with_decision(failed, before, with_end(before, False, Reason.CANCELLED), None)
    assert UsageTotals().plus(cancelled, GONE).ended == {"Cancelled|Cancelled": 1}
    # The user's cancellation came to nothing, and the job goes on: nothing of it is left.
    assert with_decision(failed, before, before, None).ended is None
    known = with_end(before, False, Reason("NewWordOfAnotherRelease"))
    assert UsageTotals().plus(decided(before, known), GONE).ended == {"Failed|Failed": 1}
    assert not is_news(known, known)


def test_phases_are_those_whose_ends_the_status_tells() -> None:
    built = observing(a_job()).training()
    status = built.status.model_copy(
        update={
            "start_time": timestamp(after(20)),
            "attempts": [
                Attempt(
                    number=0,
                    start_time=timestamp(after(100)),
                    scheduled_time=timestamp(after(130)),
                    prepared_time=timestamp(after(142)),
                    running_time=timestamp(after(190)),
                )
            ],
            "progress": ProgressStatus(first_step_time=timestamp(after(220))),
        }
    )
    moments = {ConditionType.FETCHED: (Reason.SKIPPED, 25), ConditionType.PREPARED: (Reason.COMPLETED, 85)}
    moments |= {ConditionType.TRAINED: (Reason.COMPLETED, 1190), ConditionType.MERGED: (Reason.COMPLETED, 1250)}
    conditions = status.conditions
    for kind, (reason, seconds) in moments.items():
        kept = [one for one in conditions if one.type is not kind]
        conditions = with_condition(kept, kind, True, reason, "", generation=1, now=timestamp(after(seconds)))
    found = phase_seconds(status.model_copy(update={"conditions": conditions}), T0)
    assert found == {
        "pending": 20,
        "preflight": 60,
        "queue": 15,
        "schedule": 30,
        "startup": 12,
        "pull": 48,
        "train": 1000,
        "merge": 60,
        "first_step": 200,
    }
    assert phase_seconds(FineTuneJobStatus(), None) == {}
    # A kubelet that does not say when volumes and network were there.
    (attempt,) = status.attempts
    silent = status.model_copy(update={"attempts": [attempt.model_copy(update={"prepared_time": ""})]})
    assert {phase: seconds for phase, seconds in phase_seconds(silent, T0).items() if phase in ("startup", "pull")} == {
        "startup": 60
    }

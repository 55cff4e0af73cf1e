"""Durations of phases, as far as a status shows them."""

from __future__ import annotations

from finetune_job.api.status import Attempt, FineTuneJobStatus, ProgressStatus
from finetune_job.conditions import with_condition
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.phases import phase_seconds
from finetune_operator.decide.seen.times import timestamp
from tests.support.builders import T0, a_job, after, observing


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

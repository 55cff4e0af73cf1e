"""The record of the gang's attempts in status: opened when an attempt's Job is first seen, closed with its evidence."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from finetune_job.api.status import Attempt, FineTuneJobStatus
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.clock import timestamp

HISTORY_LIMIT = 64
"""Attempts kept in status, the latest ones."""
ABRIDGED_TEXT_LIMIT = 256
"""Characters kept of a text of an attempt that is not the latest: an object in etcd holds at most 1.5 MiB."""


def record_of(status: FineTuneJobStatus, number: int) -> Attempt | None:
    """The record of an attempt, if there is one."""
    return next((attempt for attempt in reversed(status.attempts) if attempt.number == number), None)


def opened(status: FineTuneJobStatus, number: int, start: datetime) -> list[Attempt]:
    """The history with an attempt that now runs."""
    return _history(status, Attempt(number=number, start_time=timestamp(start)))


def closed(
    status: FineTuneJobStatus,
    number: int,
    now: datetime,
    outcome: Literal["Succeeded", "Failed", "Suspended"],
    failure: Failure | None = None,
    *,
    counted: bool = False,
) -> list[Attempt]:
    """The history with the end of an attempt, whether its start was recorded or not."""
    before = record_of(status, number) or Attempt(number=number, start_time=timestamp(now))
    after = before.model_copy(
        update={
            "outcome": outcome,
            "end_time": timestamp(now),
            "failure": failure.failure if failure is not None else None,
            "counted": counted,
            "message": failure.message if failure is not None else "",
            "hint": failure.hint if failure is not None else "",
            "evidence": list(failure.evidence) if failure is not None else [],
        }
    )
    return _history(status, after)


def _history(status: FineTuneJobStatus, latest: Attempt) -> list[Attempt]:
    earlier = [_abridged(attempt) for attempt in status.attempts if attempt.number != latest.number]
    return [*earlier, latest][-HISTORY_LIMIT:]


def _abridged(attempt: Attempt) -> Attempt:
    """An earlier attempt with the cause of its end alone, in few words."""
    cause = [
        one.model_copy(update={"message": one.message[:ABRIDGED_TEXT_LIMIT], "hint": one.hint[:ABRIDGED_TEXT_LIMIT]})
        for one in attempt.evidence[:1]
    ]
    texts = {"message": attempt.message[:ABRIDGED_TEXT_LIMIT], "hint": attempt.hint[:ABRIDGED_TEXT_LIMIT]}
    return attempt.model_copy(update={**texts, "evidence": cause})

"""The records of each role in status: its attempts, which are opened when their pods are first seen and closed with their
evidence, and its restart counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from finetune_job.api.status import Attempt, FineTuneJobStatus, Restarts
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome
from finetune_operator.decide.children_seen import PodView
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.times import timestamp

HISTORY_LIMIT = 64
"""Number of attempts that status keeps, the latest ones."""
ABRIDGED_TEXT_LIMIT = 256
"""Longest text of an attempt other than the latest, in characters: an object in etcd holds at most 1.5 MiB."""


def record_of(status: FineTuneJobStatus, role: Role, number: int) -> Attempt | None:
    """The record of an attempt, if there is one."""
    return next((attempt for attempt in reversed(status.attempts) if (attempt.role, attempt.number) == (role, number)), None)


def latest_of(status: FineTuneJobStatus, role: Role) -> Attempt | None:
    """The latest record of a role."""
    return next((attempt for attempt in reversed(status.attempts) if attempt.role is role), None)


@dataclass(frozen=True)
class GangSize:
    """The size of one attempt of an elastic gang."""

    nodes: int
    ranks: int


def opened(
    status: FineTuneJobStatus,
    role: Role,
    number: int,
    start: datetime,
    pods: Sequence[PodView] = (),
    *,
    size: GangSize | None = None,
) -> list[Attempt]:
    """Return the history with an attempt that now runs. `pods`: the pods of this attempt."""
    # A pod that runs its second attempt was scheduled for the first one.
    placed = [pod for pod in pods if pod.attempt == number]
    scheduled = [pod.scheduled for pod in placed if pod.scheduled is not None]
    prepared = [pod.prepared for pod in placed if pod.prepared is not None]
    started = [pod.started for pod in pods if pod.started is not None]
    times = {
        "scheduled_time": timestamp(max(scheduled)) if scheduled else "",
        "prepared_time": timestamp(max(prepared)) if prepared else "",
        "running_time": timestamp(max(started)) if started else "",
    }
    return _history(status, Attempt(role=role, number=number, start_time=timestamp(start), **times, **_size_fields(size)))


def _size_fields(size: GangSize | None) -> dict[str, int]:
    return {} if size is None else {"nodes": size.nodes, "ranks": size.ranks}


def interrupted(status: FineTuneJobStatus, record: Attempt) -> list[Attempt]:
    """Return the history with one more preemption of an attempt by its queue."""
    return _history(status, record.model_copy(update={"interruptions": record.interruptions + 1}))


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended."""

    outcome: AttemptOutcome
    time: datetime
    failure: Failure | None = None
    counted: bool = False
    message: str = ""
    """Why it ended, if it did not fail."""
    size: GangSize | None = None
    continued: bool = False
    """Whether the next attempt runs in the same pod."""


def closed(status: FineTuneJobStatus, role: Role, number: int, end: AttemptEnd) -> list[Attempt]:
    """Return the history with the end of an attempt, whether its start was recorded or not."""
    before = record_of(status, role, number) or Attempt(role=role, number=number, start_time=timestamp(end.time))
    failure = end.failure
    after = before.model_copy(
        update={
            "outcome": end.outcome,
            "end_time": timestamp(end.time),
            "failure": failure.failure if failure is not None else None,
            "counted": end.counted,
            "continued": end.continued,
            "message": failure.message if failure is not None else end.message,
            "hint": failure.hint if failure is not None else "",
            "evidence": list(failure.evidence) if failure is not None else [],
            **_size_fields(end.size),
        }
    )
    return _history(status, after)


def _history(status: FineTuneJobStatus, latest: Attempt) -> list[Attempt]:
    earlier = [
        _abridged(attempt) for attempt in status.attempts if (attempt.role, attempt.number) != (latest.role, latest.number)
    ]
    return [*earlier, latest][-HISTORY_LIMIT:]


def _abridged(attempt: Attempt) -> Attempt:
    """Reduce the record of an earlier attempt to the cause of its end, with short texts."""
    cause = [
        rank_failure.model_copy(
            update={"message": rank_failure.message[:ABRIDGED_TEXT_LIMIT], "hint": rank_failure.hint[:ABRIDGED_TEXT_LIMIT]}
        )
        for rank_failure in attempt.evidence[:1]
    ]
    texts = {"message": attempt.message[:ABRIDGED_TEXT_LIMIT], "hint": attempt.hint[:ABRIDGED_TEXT_LIMIT]}
    return attempt.model_copy(update={**texts, "evidence": cause})


def restarts_of(status: FineTuneJobStatus, role: Role) -> Restarts:
    """Counters of a role."""
    if role is Role.TRAIN:
        return status.restarts
    counters: Restarts = getattr(status.role_restarts, role.value)
    return counters


def with_restarts(status: FineTuneJobStatus, role: Role, restarts: Restarts) -> dict[str, Any]:
    """Fields of the status, as `PassResult.set` takes them, that set the counters of a role."""
    if role is Role.TRAIN:
        return {"restarts": restarts}
    return {"role_restarts": status.role_restarts.model_copy(update={role.value: restarts})}


def newest_checkpoint(status: FineTuneJobStatus, role: Role) -> int | None:
    """Step of the newest checkpoint that the operator knows of; only training has checkpoints."""
    if role is not Role.TRAIN or status.progress is None:
        return None
    return status.progress.checkpoint_step

"""The attempt records and restart counters of each role in status. A record is opened when the attempt's pods are first seen
running, and closed with the evidence of how the attempt ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from finetune_job.api.status import Attempt, FineTuneJobStatus, RankFailure, Restarts
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome
from finetune_operator.decide.failures.classify import Failure
from finetune_operator.decide.seen.children_seen import PodView
from finetune_operator.decide.seen.times import timestamp

ModelT = TypeVar("ModelT", Attempt, RankFailure)
HISTORY_LIMIT = 64
"""Maximum number of attempts that status keeps; older ones are dropped."""
ABRIDGED_TEXT_LIMIT = 256
"""Maximum length of a string in an earlier attempt's record, in characters, because etcd stores at most 1.5 MiB per object."""


def record_of(status: FineTuneJobStatus, role: Role, number: int) -> Attempt | None:
    """The record of an attempt, if there is one."""
    return next((attempt for attempt in reversed(status.attempts) if (attempt.role, attempt.number) == (role, number)), None)


def newly_closed(before: FineTuneJobStatus, after: FineTuneJobStatus, role: Role, number: int) -> Attempt | None:
    """The record of an attempt that has ended in `after` but not yet in `before`; otherwise None."""
    old, new = record_of(before, role, number), record_of(after, role, number)
    was_open = old is None or old.outcome == AttemptOutcome.RUNNING
    return new if was_open and new is not None and new.outcome != AttemptOutcome.RUNNING else None


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
    """Return the history with a record of the attempt that is running now. `pods`: the pods of this attempt."""
    scheduled = [pod.scheduled for pod in pods if pod.scheduled is not None]
    prepared = [pod.prepared for pod in pods if pod.prepared is not None]
    started = [pod.started for pod in pods if pod.started is not None]
    times = {
        "scheduled_time": timestamp(max(scheduled)) if scheduled else "",
        "prepared_time": timestamp(max(prepared)) if prepared else "",
        "running_time": timestamp(max(started)) if started else "",
    }
    return with_record(status, Attempt(role=role, number=number, start_time=timestamp(start), **times, **_size_fields(size)))


def _size_fields(size: GangSize | None) -> dict[str, int]:
    return {} if size is None else {"nodes": size.nodes, "ranks": size.ranks}


def closed(
    status: FineTuneJobStatus,
    role: Role,
    number: int,
    outcome: AttemptOutcome,
    time: datetime,
    *,
    failure: Failure | None = None,
    counted: bool = False,
    message: str = "",
    size: GangSize | None = None,
) -> list[Attempt]:
    """Return the history with the end of an attempt, whether or not its start was recorded. `message`: why the attempt ended, if
    it did not fail.
    """
    before = record_of(status, role, number) or Attempt(role=role, number=number, start_time=timestamp(time))
    after = before.model_copy(
        update={
            "outcome": outcome,
            "end_time": timestamp(time),
            "failure": failure.failure if failure is not None else None,
            "counted": counted,
            "message": failure.message if failure is not None else message,
            "hint": failure.hint if failure is not None else "",
            "evidence": list(failure.evidence) if failure is not None else [],
            **_size_fields(size),
        }
    )
    return with_record(status, after)


def with_record(status: FineTuneJobStatus, latest: Attempt) -> list[Attempt]:
    """Return the history with this record of the latest attempt, in place of the attempt's earlier record, if any."""

    def with_short_texts(model: ModelT) -> ModelT:
        return model.model_copy(update={name: getattr(model, name)[:ABRIDGED_TEXT_LIMIT] for name in ("message", "hint")})

    # Records of earlier attempts are reduced to the cause of their end.
    earlier = [
        with_short_texts(attempt).model_copy(update={"evidence": list(map(with_short_texts, attempt.evidence[:1]))})
        for attempt in status.attempts
        if (attempt.role, attempt.number) != (latest.role, latest.number)
    ]
    return [*earlier, latest][-HISTORY_LIMIT:]


def restarts_of(status: FineTuneJobStatus, role: Role) -> Restarts:
    """Restart counters of a role."""
    if role is Role.TRAIN:
        return status.restarts
    counters: Restarts = getattr(status.role_restarts, role.value)
    return counters


def with_restarts(status: FineTuneJobStatus, role: Role, restarts: Restarts) -> dict[str, Any]:
    """Return the status fields that hold a role's new restart counters, as arguments for `PassResult.set`."""
    if role is Role.TRAIN:
        return {"restarts": restarts}
    return {"role_restarts": status.role_restarts.model_copy(update={role.value: restarts})}


def newest_checkpoint(status: FineTuneJobStatus, role: Role) -> int | None:
    """Step of the newest checkpoint known to the operator; only training has checkpoints."""
    if role is not Role.TRAIN or status.progress is None:
        return None
    return status.progress.checkpoint_step

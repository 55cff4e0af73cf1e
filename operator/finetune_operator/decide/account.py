"""The account of one job, for counters that outlive it: its GPU seconds by outcome, its restarts and its result.

An account is complete up to `at`: it contains what the job's pods held before that moment, and nothing after. So every second
is added once, however often and by however many processes this is computed. `cluster.accounts` keeps the accounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints

from finetune_job.api.status import Attempt, FineTuneJobStatus
from finetune_job.conditions import find_condition
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.attempts import record_of
from finetune_operator.decide.children_seen import PodView
from finetune_operator.decide.phases import phase_seconds
from finetune_operator.decide.stage import ATTEMPT_FIELD, attempt_of, is_terminal
from finetune_operator.decide.usage_labels import JobLabels

N = TypeVar("N", int, float)
Place = Annotated[str, StringConstraints(pattern=r"^[a-z]+/-?[0-9]{1,19}$")]
"""Role and attempt. Anybody may have edited the number in the status, so it is any number that the API server stores."""
WAITING, PRODUCTIVE, LOST = "waiting", "productive", "lost"
OUTCOMES = (WAITING, PRODUCTIVE, LOST)
"""Outcomes of GPU seconds: held by a pod that had not started yet; kept by a checkpoint or a finished training; neither."""
_KEPT_BY_SIGTERM = (FailureClass.PREEMPTED,)
"""Failure classes for which the ranks save a checkpoint before they exit."""
_KEEPS_ITS_STEPS = (AttemptOutcome.SUCCEEDED, AttemptOutcome.SUSPENDED, AttemptOutcome.RESIZED)


class Ended(BaseModel):
    """How a job ended."""

    model_config = ConfigDict(frozen=True)
    result: str
    """`Succeeded`, `Failed` or `Cancelled`."""
    reason: str
    seconds: Mapping[str, FiniteFloat] = Field(default_factory=dict)
    """Duration of each phase that is known."""


class JobAccount(BaseModel):
    """The account of one job. `pending` and `ended` are written before the status that says the same, and count once it does."""

    model_config = ConfigDict(frozen=True)
    labels: JobLabels
    gpus: int = 0
    """GPUs of one training pod."""
    at: FiniteFloat = 0.0
    """Seconds since the epoch."""
    gpu_seconds: Mapping[str, FiniteFloat] = Field(default_factory=dict)
    """GPU seconds by outcome."""
    open_seconds: FiniteFloat = 0.0
    """GPU seconds that the current attempt has trained since its latest checkpoint; their outcome is not known yet."""
    checkpoint: int | None = None
    """Step of the newest checkpoint that was seen."""
    restarts: Mapping[str, int] = Field(default_factory=dict)
    """Number of restarts by `restart_key`."""
    pending: Mapping[Place, str] = Field(default_factory=dict)
    """Role and attempt -> the `restart_key` of the restart after it."""
    ended: Ended | None = None


class Confirmed(NamedTuple):
    """How far the status of a job confirms its account. If the job is gone, everything that was pending counts as confirmed."""

    has_ended: bool
    attempts: Mapping[str, int]
    """Role -> number of the current attempt."""


GONE = Confirmed(True, {})


def restart_key(attempt: Attempt) -> str:
    """Return the key of a restart: its failure class, and whether it was counted."""
    return f"{attempt.failure or FailureClass.UNKNOWN}|{'true' if attempt.counted else 'false'}"


def with_pods(account: JobAccount, pods: Iterable[PodView], number: int, now: float) -> JobAccount:
    """Return the account with what its training pods held between `at` and `now`. `number`: that of the Job that trains."""
    if now <= account.at or not account.gpus:
        return account
    waited = trained = idle = 0.0
    for pod in pods:
        # A container that was restarted has not waited since its first start.
        first = pod.earlier.started if pod.earlier is not None else pod.started
        begun = pod.scheduled or first
        if pod.role is not Role.TRAIN or begun is None:
            continue
        end = _end(pod, account.at, now)
        started = min(first.timestamp(), end) if first is not None else end
        waited += _overlap(begun.timestamp(), started, account.at, now)
        ran = _overlap(started, end, account.at, now)
        if pod.attempt == number:
            trained += ran
        else:
            idle += ran
    if not (waited or trained or idle):
        # `at` stays, so that a job that holds nothing costs no write.
        return account
    seconds = added(account.gpu_seconds, {WAITING: waited * account.gpus, LOST: idle * account.gpus})
    open_seconds = account.open_seconds + trained * account.gpus
    return account.model_copy(update={"gpu_seconds": seconds, "open_seconds": open_seconds, "at": now})


def with_checkpoint(account: JobAccount, step: int | None) -> JobAccount:
    """Return the account once a checkpoint of that step is known: what was trained until then is productive."""
    if step is None or (account.checkpoint is not None and step <= account.checkpoint):
        return account
    return _settled(account, kept=True).model_copy(update={"checkpoint": step})


def is_news(before: FineTuneJobStatus, after: FineTuneJobStatus) -> bool:
    """Whether `after` says something that accounts record: that an attempt ended, how the job ended, or that nothing of it runs
    any more.
    """
    if is_result(after):
        return not is_result(before) or is_terminal(after)
    return any(_closed_now(before, after, role) is not None for role in Role)


def with_decision(
    account: JobAccount, before: FineTuneJobStatus, after: FineTuneJobStatus, created: datetime | None
) -> JobAccount:
    """Return the account as it must be on record before `after` replaces `before`. `created`: when the job was created."""
    confirmed = confirmed_by(before)
    account = with_told_restarts(account, confirmed)
    restarts = {
        f"{role}/{attempt_of(before, role)}": restart_key(record)
        for role in Role
        if (record := _closed_now(before, after, role)) is not None
        and record.outcome == AttemptOutcome.FAILED
        and attempt_of(after, role) > attempt_of(before, role)
    }
    ended = ended_by(after, created)
    training = _closed_now(before, after, Role.TRAIN)
    if training is not None:
        kept = training.outcome in _KEEPS_ITS_STEPS or training.failure in _KEPT_BY_SIGTERM
        account = _settled(account, kept=kept)
    elif ended is not None:
        account = _settled(account, kept=False)
    return account.model_copy(update={"pending": restarts, "ended": ended})


def _closed_now(before: FineTuneJobStatus, after: FineTuneJobStatus, role: Role) -> Attempt | None:
    """The record of the current attempt, if this decision closes it."""
    number = attempt_of(before, role)
    old, new = record_of(before, role, number), record_of(after, role, number)
    is_closed = (
        new is not None and new.outcome != AttemptOutcome.RUNNING and (old is None or old.outcome == AttemptOutcome.RUNNING)
    )
    return new if is_closed else None


def confirmed_by(status: FineTuneJobStatus) -> Confirmed:
    """Return what a status confirms of the pending entries."""
    return Confirmed(is_result(status), {str(role): int(getattr(status, field)) for role, field in ATTEMPT_FIELD.items()})


def is_result(status: FineTuneJobStatus) -> bool:
    """Whether the status says how the job ended."""
    succeeded = find_condition(status.conditions, ConditionType.SUCCEEDED)
    return succeeded is not None and succeeded.status != "Unknown"


def ended_by(status: FineTuneJobStatus, created: datetime | None) -> Ended | None:
    """How the job ended according to its status; None if it has not ended."""
    succeeded = find_condition(status.conditions, ConditionType.SUCCEEDED)
    if succeeded is None or succeeded.status == "Unknown":
        return None
    result = "Succeeded" if succeeded.status == "True" else "Cancelled" if succeeded.reason == Reason.CANCELLED else "Failed"
    known = next((str(reason) for reason in Reason if reason == succeeded.reason), str(Reason.FAILED))
    return Ended(result=result, reason=known, seconds=phase_seconds(status, created))


def closed_account(account: JobAccount) -> JobAccount:
    """The account of a job that ended or is gone: what no checkpoint keeps is lost."""
    return _settled(account, kept=False)


def with_told_restarts(account: JobAccount, confirmed: Confirmed) -> JobAccount:
    """Count the pending restarts that the status confirms; the others stay pending."""
    confirmed_keys = [key for place, key in account.pending.items() if confirmed is GONE or _is_later(confirmed.attempts, place)]
    if not confirmed_keys:
        return account
    pending = (
        {}
        if confirmed is GONE
        else {place: key for place, key in account.pending.items() if not _is_later(confirmed.attempts, place)}
    )
    restarts = account.restarts
    for key in confirmed_keys:
        restarts = added(restarts, {key: 1})
    return account.model_copy(update={"restarts": restarts, "pending": pending})


def added(values: Mapping[str, N], more: Mapping[str, N]) -> dict[str, N]:
    """The sums by key. A value of zero adds no key."""
    result = dict(values)
    for key, value in more.items():
        if value:
            result[key] = result.get(key, type(value)(0)) + value
    return result


def _is_later(attempts: Mapping[str, int], place: str) -> bool:
    role, _, number = place.partition("/")
    return attempts.get(role, 0) > int(number)


def _settled(account: JobAccount, *, kept: bool) -> JobAccount:
    if not account.open_seconds:
        return account
    seconds = added(account.gpu_seconds, {PRODUCTIVE if kept else LOST: account.open_seconds})
    return account.model_copy(update={"gpu_seconds": seconds, "open_seconds": 0.0})


def _end(pod: PodView, at: float, now: float) -> float:
    """When the pod stopped holding its GPUs, in seconds since the epoch."""
    if pod.finished is not None:
        return min(pod.finished.timestamp(), now)
    if not pod.is_terminal:
        return now
    # It vanished without a report: it was deleted by force, or its node is gone.
    due = pod.deletion_due or pod.deletion_requested
    return min(due.timestamp(), now) if due is not None else at


def _overlap(begun: float, end: float, after: float, before: float) -> float:
    return max(min(end, before) - max(begun, after), 0.0)

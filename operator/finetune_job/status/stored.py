"""The status of a job as the API server holds it, whichever release wrote it last.

An operator is upgraded, or rolled back, while jobs run. What an earlier release left out is read as what it meant there; words
that a later release invented are left out, or read as the nearest that this one knows, because a job whose status cannot be read
is a job that nobody looks after.
"""

from __future__ import annotations

from typing import Any

from finetune_job.api.status import Condition, FineTuneJobStatus
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_job.status.conditions import find

_CONDITIONS = frozenset(map(str, ConditionType))
_ROLES = frozenset(map(str, Role))
_FAILURES = frozenset(map(str, FailureClass))
_OUTCOMES = frozenset({"Running", "Succeeded", "Failed", "Suspended"})
_NOT_BEGUN = (Reason.NOT_OBSERVED, Reason.PENDING)


def read_status(content: dict[str, Any] | None) -> FineTuneJobStatus:
    """`status` of a FineTuneJob. Raises pydantic.ValidationError for what no release ever wrote."""
    content = dict(content or {})
    if "conditions" in content:
        content["conditions"] = [one for one in content["conditions"] if one.get("type") in _CONDITIONS]
    if "attempts" in content:
        content["attempts"] = [_known(one) for one in content["attempts"] if one.get("role", Role.TRAIN) in _ROLES]
    status = FineTuneJobStatus.model_validate(content)
    return status.model_copy(update={"conditions": [*_before_fetch(status), *status.conditions]})


def _known(attempt: dict[str, Any]) -> dict[str, Any]:
    """The record of an attempt with the words of this release."""
    evidence = [_with_known_failure(one) for one in attempt.get("evidence") or ()]
    outcome = attempt.get("outcome", "Running")
    return _with_known_failure(attempt) | {
        "evidence": evidence,
        "outcome": outcome if outcome in _OUTCOMES else "Failed",
    }


def _with_known_failure(record: dict[str, Any]) -> dict[str, Any]:
    failure = record.get("failure")
    return record if failure is None or failure in _FAILURES else record | {"failure": str(FailureClass.UNKNOWN)}


def _before_fetch(status: FineTuneJobStatus) -> list[Condition]:
    """The first releases read from claims alone and knew no condition `Fetched`: once the plan was stored, preflight was next."""
    prepared = find(status.conditions, ConditionType.PREPARED)
    if prepared is None or find(status.conditions, ConditionType.FETCHED) is not None:
        return []
    has_begun = prepared.reason not in _NOT_BEGUN
    fetched = prepared.model_copy(
        update={
            "type": ConditionType.FETCHED,
            "status": "True" if has_begun else "Unknown",
            "reason": str(Reason.SKIPPED) if has_begun else prepared.reason,
            "message": "Model and data are on claims." if has_begun else "",
        }
    )
    return [fetched]

"""What a job says while the passes over it fail. No pass can say so itself, so this works on the status as it is stored.

`Ready` has the reason `OperatorError` from the eighth failure in a row on, about a minute. It stays until a pass has gone well to
its end: a pass that writes status and fails after that would otherwise take the message back each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune_job.api.status import Condition, FineTuneJobStatus
from finetune_job.conditions import ConditionValue, find_condition, initial_conditions, is_condition_true
from finetune_job.finding import MAX_TEXT_LENGTH
from finetune_job.reasons import STAGES, ConditionType, Reason

FAILURES_BEFORE_TOLD = 8
"""Passes that fail in a row before the job says so: less is an API server that is being replaced."""
_NOT_BEGUN = (Reason.NOT_OBSERVED, Reason.PENDING)


def with_operator_error(status: Mapping[str, Any], generation: int, now: str, words: str) -> dict[str, Any] | None:
    """The part of a stored status that tells of the error; None: it is told already, or the job has ended.

    What is not understood of the status stays: it may be what the passes fail over.
    """
    stored = [one for one in status.get("conditions") or () if isinstance(one, Mapping)]
    by_type = {one.get("type"): one for one in stored}
    before = by_type.get(ConditionType.READY, {})
    if before.get("reason") == Reason.OPERATOR_ERROR or by_type.get(ConditionType.FINISHED, {}).get("status") == "True":
        return None
    said = {
        "type": str(ConditionType.READY),
        "status": "False",
        "reason": str(Reason.OPERATOR_ERROR),
        "message": f"The operator cannot work on this job, and tries again every minute: {words}"[:MAX_TEXT_LENGTH],
        "observedGeneration": generation,
        "lastTransitionTime": before.get("lastTransitionTime", now) if before.get("status") == "False" else now,
    }
    others = stored or [one.model_dump(mode="json", by_alias=True) for one in initial_conditions(generation=generation, now=now)]
    if before or not stored:
        conditions = [said if one.get("type") == ConditionType.READY else dict(one) for one in others]
    else:
        conditions = [*map(dict, others), said]
    return {"conditions": conditions}


def is_told(status: FineTuneJobStatus) -> bool:
    """Whether the status tells of an error of the operator."""
    ready = find_condition(status.conditions, ConditionType.READY)
    return ready is not None and ready.reason == Reason.OPERATOR_ERROR


def with_error_kept(before: FineTuneJobStatus, after: FineTuneJobStatus | None) -> FineTuneJobStatus | None:
    """What a pass may write of `after` while it is not known whether it ends well; None: nothing."""
    told = find_condition(before.conditions, ConditionType.READY)
    if after is None or told is None or not is_told(before) or is_condition_true(after.conditions, ConditionType.FINISHED):
        return after
    conditions = [told if one.type is ConditionType.READY else one for one in after.conditions]
    kept = after.model_copy(update={"conditions": conditions})
    return None if kept == before else kept


def ready_without_error(conditions: Sequence[Condition]) -> tuple[ConditionValue, Reason, str]:
    """Status, reason and message of `Ready` by what else is said, for a pass that has no word of its own for it."""
    for kind in (ConditionType.STALLED, ConditionType.SUSPENDED):
        found = find_condition(conditions, kind)
        if found is not None and found.status == "True":
            return False, Reason(found.reason), found.message
    ended = find_condition(conditions, ConditionType.SUCCEEDED)
    if ended is not None and ended.status != "Unknown":
        return False, Reason(ended.reason), ""
    stages = (find_condition(conditions, kind) for kind in STAGES)
    current = next((one for one in stages if one is not None and one.status != "True"), None)
    if current is None or current.reason in _NOT_BEGUN:
        return None, Reason.NOT_OBSERVED, ""
    return False, Reason(current.reason), current.message

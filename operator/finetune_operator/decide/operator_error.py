"""Reports in a job's status that its passes fail. A failing pass cannot report this itself, so the stored status is edited.

After eight failures in a row, which takes about a minute, `Ready` gets the reason `OperatorError`. It stays until a pass succeeds
completely: otherwise, a pass that writes status and then fails would remove the message each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune_job.api.status import Condition, FineTuneJobStatus
from finetune_job.conditions import ConditionValue, find_condition, initial_conditions, is_condition_true
from finetune_job.finding import MAX_TEXT_LENGTH
from finetune_job.reasons import STAGES, ConditionType, Reason

FAILURES_BEFORE_REPORT = 8
"""Number of failed passes in a row that the job's status reports; fewer are normal while an API server is replaced."""
_NOT_BEGUN = (Reason.NOT_OBSERVED, Reason.PENDING)


def with_operator_error(status: Mapping[str, Any], generation: int, now: str, words: str) -> dict[str, Any] | None:
    """Return a partial status that reports the error; None if the stored status already reports it, or if the job has ended.

    Unparsable parts of the status are kept: they may be the reason why the passes fail.
    """
    stored = [condition for condition in status.get("conditions") or () if isinstance(condition, Mapping)]
    by_type = {condition.get("type"): condition for condition in stored}
    before = by_type.get(ConditionType.READY, {})
    if before.get("reason") == Reason.OPERATOR_ERROR or by_type.get(ConditionType.FINISHED, {}).get("status") == "True":
        return None
    ready = {
        "type": str(ConditionType.READY),
        "status": "False",
        "reason": str(Reason.OPERATOR_ERROR),
        "message": f"The operator cannot work on this job, and tries again every minute: {words}"[:MAX_TEXT_LENGTH],
        "observedGeneration": generation,
        "lastTransitionTime": before.get("lastTransitionTime", now) if before.get("status") == "False" else now,
    }
    others = stored or [
        condition.model_dump(mode="json", by_alias=True) for condition in initial_conditions(generation=generation, now=now)
    ]
    if before or not stored:
        conditions = [ready if condition.get("type") == ConditionType.READY else dict(condition) for condition in others]
    else:
        conditions = [*map(dict, others), ready]
    return {"conditions": conditions}


def is_reported(status: FineTuneJobStatus) -> bool:
    """Whether the status reports an error of the operator."""
    ready = find_condition(status.conditions, ConditionType.READY)
    return ready is not None and ready.reason == Reason.OPERATOR_ERROR


def with_error_kept(before: FineTuneJobStatus, after: FineTuneJobStatus | None) -> FineTuneJobStatus | None:
    """Return the part of `after` that may be written while it is not yet known whether the pass succeeds; None if none may."""
    ready = find_condition(before.conditions, ConditionType.READY)
    if after is None or ready is None or not is_reported(before) or is_condition_true(after.conditions, ConditionType.FINISHED):
        return after
    conditions = [ready if condition.type is ConditionType.READY else condition for condition in after.conditions]
    kept = after.model_copy(update={"conditions": conditions})
    return None if kept == before else kept


def ready_without_error(conditions: Sequence[Condition]) -> tuple[ConditionValue, Reason, str]:
    """Derive status, reason and message of `Ready` from the other conditions, for a pass that does not set it."""
    for kind in (ConditionType.STALLED, ConditionType.SUSPENDED):
        condition = find_condition(conditions, kind)
        if condition is not None and condition.status == "True":
            return False, Reason(condition.reason), condition.message
    ended = find_condition(conditions, ConditionType.SUCCEEDED)
    if ended is not None and ended.status != "Unknown":
        return False, Reason(ended.reason), ""
    stages = (find_condition(conditions, kind) for kind in STAGES)
    current = next((stage for stage in stages if stage is not None and stage.status != "True"), None)
    if current is None or current.reason in _NOT_BEGUN:
        return None, Reason.NOT_OBSERVED, ""
    return False, Reason(current.reason), current.message

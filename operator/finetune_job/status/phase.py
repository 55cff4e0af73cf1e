"""The phase: one word for `kubectl get`, derived from the conditions. Nothing reads it back."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.api.status import Condition
from finetune_job.reasons import ConditionType, Reason
from finetune_job.status.conditions import find, is_true

_NEXT = {
    ConditionType.VALIDATED: "Pending",
    ConditionType.FETCHED: "Fetching",
    ConditionType.PREPARED: "Preflight",
    ConditionType.TRAINED: "Training",
    ConditionType.MERGED: "Merging",
    ConditionType.PUBLISHED: "Publishing",
}

_RESTARTING = (Reason.RESTARTING, Reason.BACKING_OFF, Reason.BLOCKED_ON_NODE)


def phase(conditions: Sequence[Condition]) -> str:
    """The phase of a job: what it ended as, what holds it up, or the first stage that is not done."""
    succeeded = find(conditions, ConditionType.SUCCEEDED)
    if is_true(conditions, ConditionType.FINISHED) and succeeded is not None:
        if succeeded.status == "True":
            return "Succeeded"
        return "Cancelled" if succeeded.reason == Reason.CANCELLED else "Failed"
    finished = find(conditions, ConditionType.FINISHED)
    if finished is not None and finished.reason == Reason.STOPPING:
        return "Stopping"
    if is_true(conditions, ConditionType.STALLED):
        return "Stalled"
    if is_true(conditions, ConditionType.SUSPENDED):
        return "Suspended"
    trained = find(conditions, ConditionType.TRAINED)
    if trained is not None and trained.reason in _RESTARTING:
        return "Restarting"
    return next((word for kind, word in _NEXT.items() if not is_true(conditions, kind)), "Finishing")

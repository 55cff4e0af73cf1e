"""Conditions, and the phase derived from them: a one-word summary for `kubectl get`, on which no program depends.

`lastTransitionTime` changes only if the status of a condition changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune_job.api.status import Condition
from finetune_job.finding import MAX_TEXT_LENGTH
from finetune_job.reasons import ConditionType, Phase, Reason

ConditionValue = bool | None
"""True, False, or None for Unknown."""
_ORDER = {kind: place for place, kind in enumerate(ConditionType)}
_WORDS = {True: "True", False: "False", None: "Unknown"}
_NEXT = {
    ConditionType.VALIDATED: Phase.PENDING,
    ConditionType.FETCHED: Phase.FETCHING,
    ConditionType.PREPARED: Phase.PREFLIGHT,
    ConditionType.TRAINED: Phase.TRAINING,
    ConditionType.MERGED: Phase.MERGING,
    ConditionType.PUBLISHED: Phase.PUBLISHING,
}
_RESTARTING = (Reason.RESTARTING, Reason.RESIZING, Reason.BACKING_OFF, Reason.BLOCKED_ON_NODE)


def find_condition(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """Return the condition of this type; None if there is none."""
    for condition in conditions:
        if condition.type is kind:
            return condition
    return None


def is_condition_true(conditions: Sequence[Condition], kind: ConditionType) -> bool:
    """Whether the condition exists and is True."""
    condition = find_condition(conditions, kind)
    return condition is not None and condition.status == "True"


def with_condition(
    conditions: Sequence[Condition],
    kind: ConditionType,
    status: ConditionValue,
    reason: Reason,
    message: str,
    *,
    generation: int,
    now: str,
) -> list[Condition]:
    """Return the conditions with one of them set, in the order of `ConditionType`. now: RFC 3339."""
    before = find_condition(conditions, kind)
    word = _WORDS[status]
    unchanged = before is not None and before.status == word
    content = (str(reason), message[:MAX_TEXT_LENGTH], generation)
    if unchanged and before is not None and (before.reason, before.message, before.observed_generation) == content:
        return list(conditions)
    after = Condition.model_validate(
        {
            "type": kind,
            "status": word,
            "reason": content[0],
            "message": content[1],
            "observedGeneration": content[2],
            "lastTransitionTime": before.last_transition_time if before is not None and unchanged else now,
        }
    )
    others = [condition for condition in conditions if condition.type is not kind]
    return sorted([*others, after], key=lambda condition: _ORDER[condition.type])


def initial_conditions(*, generation: int, now: str) -> list[Condition]:
    """Return every condition as Unknown, for a job that the operator sees for the first time."""
    conditions: list[Condition] = []
    for kind in ConditionType:
        conditions = with_condition(conditions, kind, None, Reason.NOT_OBSERVED, "", generation=generation, now=now)
    return conditions


def job_phase(conditions: Sequence[Condition]) -> Phase:
    """Return the phase of a job: its outcome, what is holding it up, or the first stage that is not done."""
    succeeded = find_condition(conditions, ConditionType.SUCCEEDED)
    if is_condition_true(conditions, ConditionType.FINISHED) and succeeded is not None:
        if succeeded.status == "True":
            return Phase.SUCCEEDED
        return Phase.CANCELLED if succeeded.reason == Reason.CANCELLED else Phase.FAILED
    finished = find_condition(conditions, ConditionType.FINISHED)
    if finished is not None and finished.reason == Reason.STOPPING:
        return Phase.STOPPING
    if is_condition_true(conditions, ConditionType.STALLED):
        return Phase.STALLED
    if is_condition_true(conditions, ConditionType.SUSPENDED):
        return Phase.SUSPENDED
    trained = find_condition(conditions, ConditionType.TRAINED)
    if trained is not None and trained.reason in _RESTARTING:
        return Phase.RESTARTING
    return next((word for kind, word in _NEXT.items() if not is_condition_true(conditions, kind)), Phase.FINISHING)

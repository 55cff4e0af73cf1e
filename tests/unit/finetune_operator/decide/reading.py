"""Short ways of saying what a pass decided."""

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import find_condition
from finetune_job.reasons import ConditionType
from finetune_operator.decide.actions import Actions


def created(actions: Actions) -> list[str]:
    """`Kind/name` of what is created, in order."""
    return [f"{action.kind}/{action.name}" for action in actions.creates]


def deleted(actions: Actions) -> list[str]:
    """`Kind/name` of what is deleted, in order."""
    return [f"{action.kind}/{action.name}" for action in actions.deletes]


def condition(actions: Actions, kind: ConditionType) -> tuple[str, str]:
    """Status and reason of a condition that was written."""
    found = find_condition(actions.status.conditions, kind)
    return found.status, found.reason


def message(actions: Actions, kind: ConditionType) -> str:
    """Message of a condition that was written."""
    found = find_condition(actions.status.conditions, kind)
    return found.message


def written(actions: Actions) -> FineTuneJobStatus:
    """The status that was written."""
    assert actions.status is not None
    return actions.status

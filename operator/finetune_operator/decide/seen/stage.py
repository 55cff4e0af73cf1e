"""The stage of a job, derived from its conditions and attempt numbers."""

from __future__ import annotations

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import find_condition, is_condition_true
from finetune_job.names import Role
from finetune_job.reasons import ConditionType

ATTEMPT_FIELD = {
    Role.FETCH: "fetch_attempt",
    Role.PREFLIGHT: "preflight_attempt",
    Role.TRAIN: "attempt",
    Role.MERGE: "merge_attempt",
    Role.PUBLISH: "publish_attempt",
}
"""Role -> field of status with the number of the role's current attempt."""
CONDITION = {
    Role.FETCH: ConditionType.FETCHED,
    Role.PREFLIGHT: ConditionType.PREPARED,
    Role.TRAIN: ConditionType.TRAINED,
    Role.MERGE: ConditionType.MERGED,
    Role.PUBLISH: ConditionType.PUBLISHED,
}
"""Role -> condition that becomes True when the role is done, in the order of the roles."""


def is_ended(status: FineTuneJobStatus) -> bool:
    """Whether the job has succeeded or failed. From then on, nothing is created for it."""
    succeeded = find_condition(status.conditions, ConditionType.SUCCEEDED)
    return is_terminal(status) or (succeeded is not None and succeeded.status != "Unknown")


def is_terminal(status: FineTuneJobStatus) -> bool:
    """Whether the job has ended and nothing that belongs to it is running any more."""
    return is_condition_true(status.conditions, ConditionType.FINISHED)


def is_started(status: FineTuneJobStatus) -> bool:
    """Whether the plan is frozen."""
    return bool(status.start_time) and status.plan is not None


def current_role(status: FineTuneJobStatus) -> Role:
    """The role whose Job is running or will run next."""
    return next(
        (role for role, condition in CONDITION.items() if not is_condition_true(status.conditions, condition)), Role.PUBLISH
    )


def attempt_of(status: FineTuneJobStatus, role: Role) -> int:
    """Number of the current attempt of a role, from 0."""
    return int(getattr(status, ATTEMPT_FIELD[role]))

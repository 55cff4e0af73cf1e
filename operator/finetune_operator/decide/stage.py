"""Which stage a job is in, read from its conditions and numbers."""

from __future__ import annotations

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.names import Role
from finetune_job.reasons import ConditionType
from finetune_job.status.conditions import is_true
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import Observed

ATTEMPT_FIELD = {
    Role.FETCH: "fetch_attempt",
    Role.PREFLIGHT: "preflight_attempt",
    Role.TRAIN: "attempt",
    Role.MERGE: "merge_attempt",
    Role.PUBLISH: "publish_attempt",
}
"""Where status holds the number of a role's current attempt."""
CONDITION = {
    Role.FETCH: ConditionType.FETCHED,
    Role.PREFLIGHT: ConditionType.PREPARED,
    Role.TRAIN: ConditionType.TRAINED,
    Role.MERGE: ConditionType.MERGED,
    Role.PUBLISH: ConditionType.PUBLISHED,
}
"""The condition that a role's Job brings about, in the order of the roles."""


def is_terminal(status: FineTuneJobStatus) -> bool:
    """Whether the job has ended for good, one way or the other."""
    return is_true(status.conditions, ConditionType.FINISHED)


def is_started(status: FineTuneJobStatus) -> bool:
    """Whether the plan is frozen."""
    return bool(status.start_time) and status.plan is not None


def current_role(status: FineTuneJobStatus) -> Role:
    """The role whose Job runs or is to run next."""
    return next((role for role, condition in CONDITION.items() if not is_true(status.conditions, condition)), Role.PUBLISH)


def attempt_of(status: FineTuneJobStatus, role: Role) -> int:
    """Number of the current attempt of a role, from 0."""
    return int(getattr(status, ATTEMPT_FIELD[role]))


def delete_earlier_attempts(observed: Observed, draft: Draft) -> None:
    """Delete Jobs whose number has been passed on: the status says so already, whoever was to delete them."""
    for batch_job in observed.batch_jobs:
        if batch_job.attempt < attempt_of(observed.job.status, batch_job.role):
            draft.delete(batch_job)


def needs_live_list(observed: Observed) -> bool:
    """Whether the next Job may only be created after a live list has shown that nothing of an earlier attempt runs."""
    status, spec = observed.job.status, observed.job.spec
    if is_terminal(status) or not is_started(status) or spec is None or spec.run.suspend:
        return False
    role = current_role(status)
    attempt = attempt_of(status, role)
    return attempt > 0 and observed.batch_job(role, attempt) is None


def left_of_earlier_attempts(observed: Observed) -> str:
    """What still has to disappear before the next Job may be created; empty where nothing is left."""
    if not needs_live_list(observed):
        return ""
    if observed.live is None:
        return "The pods of the earlier attempt have not been looked up yet."
    role = current_role(observed.job.status)
    ended = {job.name for job in observed.batch_jobs if job.role is not role}
    left = [f"Job {job.name}" for job in observed.live.batch_jobs if job.name not in ended]
    left += [f"pod {pod.name}" for pod in observed.live.running_pods]
    return f"Waiting until the earlier attempt is gone: {', '.join(left[:4])}." if left else ""

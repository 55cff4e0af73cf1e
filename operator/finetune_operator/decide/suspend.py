"""`spec.run.suspend`: release every pod and keep the checkpoint.

Suspending an attempt ends it: the same status write moves on to the number of the next one, and its Job, now of an earlier
attempt, is deleted. So resuming only means to create the Job of the current number.
"""

from __future__ import annotations

from finetune_job.conditions import find_condition
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.attempts import AttemptEnd, closed
from finetune_operator.decide.blocked import delete_earlier_attempts
from finetune_operator.decide.job_state import ends_by_itself
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.stage import ATTEMPT_FIELD, CONDITION, attempt_of, current_role
from finetune_operator.decide.times import moment_after


def suspend(observed: Observed, result: PassResult) -> None:
    """Stop what runs. A Job that ended by itself is left to its stage, which looks at it when the job continues."""
    status = observed.job.status
    message = "spec.run.suspend is true; the checkpoint is kept."
    role = current_role(status)
    attempt = attempt_of(status, role)
    batch_job = observed.batch_job(role, attempt)
    if batch_job is not None and not ends_by_itself(batch_job, observed.pods_of_job(batch_job)):
        result.set(attempts=closed(status, role, attempt, AttemptEnd(AttemptOutcome.SUSPENDED, result.now)))
        result.set(**{ATTEMPT_FIELD[role]: attempt + 1})
        if role is Role.TRAIN:
            # An elastic gang asks for all nodes when it continues.
            result.set(gang_nodes=None)
        result.condition(CONDITION[role], None, Reason.SUSPENDED_BY_USER, message)
        result.delete(batch_job)
        result.emit("Normal", Reason.SUSPENDED_BY_USER, f"Attempt {attempt} of {role} is stopped; {message}")
    delete_earlier_attempts(observed, result)
    # Whatever needs a human is looked at again when the job continues.
    result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
    result.condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER, message)
    result.condition(ConditionType.READY, False, Reason.SUSPENDED_BY_USER)


def resume(observed: Observed, result: PassResult) -> None:
    """Continue a job that is not suspended, and add up how long it was."""
    status = observed.job.status
    before = find_condition(status.conditions, ConditionType.SUSPENDED)
    since = moment_after(before.last_transition_time, 0.0) if before is not None and before.status == "True" else None
    if since is not None and status.start_time:
        result.set(suspended_seconds=status.suspended_seconds + max(int((result.now - since).total_seconds()), 0))
    result.condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED)

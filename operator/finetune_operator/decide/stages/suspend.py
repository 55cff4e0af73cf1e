"""`spec.run.suspend`: release all pods and keep the checkpoints.

Suspension ends the current attempt: the same status write increases the attempt number, and the Job, which then belongs to an
earlier attempt, is deleted. To resume, it is enough to create the Job with the current number.
"""

from __future__ import annotations

from finetune_job.conditions import find_condition
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.failures.job_state import ends_by_itself
from finetune_operator.decide.gang.attempts import closed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import ATTEMPT_FIELD, CONDITION, attempt_of, current_role
from finetune_operator.decide.seen.times import moment_after
from finetune_operator.decide.stages.blocked import delete_earlier_attempts
from finetune_operator.decide.stages.finish import stop_running


def suspend(observed: Observed, result: PassResult) -> None:
    """Stop what is running. A Job that ended on its own is left to its stage, which handles it when the FineTuneJob resumes."""
    status = observed.job.status
    message = "spec.run.suspend is true; the checkpoint is kept."
    role = current_role(status)
    attempt = attempt_of(status, role)
    batch_job = observed.batch_job(role, attempt)
    if batch_job is not None and not ends_by_itself(batch_job, observed.pods_of(batch_job.role, batch_job.attempt)):
        attempts = closed(status, role, attempt, AttemptOutcome.SUSPENDED, result.now)
        result.set(attempts=attempts, **{ATTEMPT_FIELD[role]: attempt + 1})
        if role is Role.TRAIN:
            # When an elastic gang resumes, it asks for all nodes.
            result.set(gang_nodes=None)
        result.condition(CONDITION[role], None, Reason.SUSPENDED_BY_USER, message)
        result.delete(batch_job)
        result.emit("Normal", Reason.SUSPENDED_BY_USER, f"Attempt {attempt} of {role} is stopped; {message}")
    delete_earlier_attempts(observed, result)
    if observed.live is not None:
        stop_running(observed, result)
    # Whatever needs a human is checked again when the job resumes.
    result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
    result.condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER, message)
    result.condition(ConditionType.READY, False, Reason.SUSPENDED_BY_USER)


def resume(observed: Observed, result: PassResult) -> None:
    """Resume a job that is no longer suspended, and add the duration of the suspension to the total in status."""
    status = observed.job.status
    before = find_condition(status.conditions, ConditionType.SUSPENDED)
    since = moment_after(before.last_transition_time, 0.0) if before is not None and before.status == "True" else None
    if since is not None and status.start_time:
        result.set(suspended_seconds=status.suspended_seconds + max(int((result.now - since).total_seconds()), 0))
    result.condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED)

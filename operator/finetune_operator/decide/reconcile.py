"""`reconcile(observed, now) -> Actions`: the whole of the operator's judgement, as a pure function.

It is level-based: it reads what is there and not how it came about, so that a pass may be repeated, lost, or cut off between
any two of its effects. The worker calls it for every key of its queue. The order of the questions below is the order of
precedence: an end is final, a deletion beats a cancellation, a cancellation beats a suspension, and a suspension beats every
problem.
"""

from __future__ import annotations

from datetime import datetime

from finetune_job.conditions import is_condition_true
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.blocked import delete_earlier_attempts
from finetune_operator.decide.finish import conclude, finish_cancelled, finish_failed, retain, stop_deleted
from finetune_operator.decide.frozen_plan import PlanLost, frozen_plan
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.preparation_stages import fetch_stage, preflight_stage
from finetune_operator.decide.result_stages import merge_stage, publish_stage
from finetune_operator.decide.stage import CONDITION, attempt_of, is_ended, is_started, is_terminal
from finetune_operator.decide.stopped import awaits_retry, wait_for_retry
from finetune_operator.decide.suspend import resume, suspend
from finetune_operator.decide.times import active_deadline
from finetune_operator.decide.train_stage import train_stage
from finetune_operator.decide.validate_stage import REQUEUE_SECONDS, has_begun, missing_claims, validate_stage

_STAGES = {
    Role.FETCH: fetch_stage,
    Role.PREFLIGHT: preflight_stage,
    Role.TRAIN: train_stage,
    Role.MERGE: merge_stage,
    Role.PUBLISH: publish_stage,
}


def reconcile(observed: Observed, now: datetime) -> Actions:
    """Decide what to do about one FineTuneJob. `now`: aware, UTC."""
    job = observed.job
    result = PassResult(job, now)
    if job.orphaning or (job.deleting and not is_started(job.status)):
        return Actions()
    if is_terminal(job.status):
        retain(observed, result)
        return result.actions()
    if is_ended(job.status):
        conclude(observed, result)
        return result.actions()
    if job.deleting:
        stop_deleted(observed, result)
        return result.actions()
    if job.spec is not None and not awaits_retry(job.status):
        result.set(retry_handled=max(job.spec.run.retry, job.status.retry_handled))
    if job.spec is not None and job.spec.run.cancel:
        finish_cancelled(observed, result)
    elif not is_started(job.status) or not has_begun(observed):
        _before_the_first_child(observed, result)
    elif job.spec is None:
        result.stall(Reason.INVALID_SPEC, f"The manifest is not valid any more: {job.spec_error}")
    elif job.spec.run.suspend:
        suspend(observed, result)
    else:
        resume(observed, result)
        _reconcile_started(observed, result)
    return result.actions()


def _before_the_first_child(observed: Observed, result: PassResult) -> None:
    if _waits_for_name(observed, result):
        return
    run = validate_stage(observed, result)
    if run is not None:
        _run_stages(observed, result, run)


def _reconcile_started(observed: Observed, result: PassResult) -> None:
    """Continue a started job that is not suspended."""
    job = observed.job
    deadline = active_deadline(job.spec.run, job.status) if job.spec is not None else None
    if deadline is not None:
        if result.now >= deadline:
            finish_failed(
                observed, result, Reason.ACTIVE_DEADLINE_EXCEEDED, "The job was not done within spec.run.activeDeadlineSeconds."
            )
            return
        result.requeue_at(deadline)
    delete_earlier_attempts(observed, result)
    frozen = frozen_plan(observed)
    if isinstance(frozen, PlanLost):
        result.stall(Reason.PLAN_LOST, frozen.message)
        return
    if _waits_for_name(observed, result):
        return
    missing = missing_claims(observed, template_counts=True)
    if missing:
        result.stall(Reason.CLAIM_NOT_FOUND, missing)
        result.requeue_after(REQUEUE_SECONDS)
        return
    result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
    _run_stages(observed, result, frozen)


def _run_stages(observed: Observed, result: PassResult, run: FrozenRun) -> None:
    """Run the first stage that is not done, and in the same pass those after it, for as long as each turns out to be done."""
    for role, stage in _STAGES.items():
        if is_condition_true(observed.job.status.conditions, CONDITION[role]):
            continue
        if role is Role.FETCH and run.plan.fetch is None:
            result.condition(ConditionType.FETCHED, True, Reason.SKIPPED, "Model and data are on claims.")
            continue
        if wait_for_retry(observed, result, role) or not stage(observed, result, run):
            return


def _waits_for_name(observed: Observed, result: PassResult) -> bool:
    """Whether no child may be created, because a name is taken or a Job of a later attempt than the current one exists."""
    if observed.vanishing:
        message = f"{', '.join(observed.vanishing)} of an earlier job of this name is still being deleted."
        result.condition(ConditionType.READY, False, Reason.PENDING, message)
        # This passes by itself, even if the job was stalled over it before.
        result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
        result.requeue_after(REQUEUE_SECONDS)
        return True
    taken = _conflict(observed)
    if taken:
        result.stall(Reason.CONFLICT, taken)
        result.requeue_after(REQUEUE_SECONDS)
    return bool(taken)


def _conflict(observed: Observed) -> str:
    if observed.conflicts:
        return f"{', '.join(observed.conflicts)} exists and does not belong to this job. Delete it, or give the job another name."
    ahead = [job.name for job in observed.batch_jobs if job.attempt > attempt_of(observed.job.status, job.role)]
    if ahead:
        return f"Job {', '.join(ahead)} is of a later attempt than status knows. Was status restored from a backup? Delete it."
    return ""

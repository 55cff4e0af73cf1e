"""`reconcile(observed, now) -> Actions`: all decisions of the operator, in one pure function.

It is level-based: it depends only on the current state, so a pass can be repeated, lost, or interrupted between any two of its
effects. The worker calls it for every key it takes from the queue. The order of the checks below is their precedence: an outcome
is final, a deletion beats a cancellation, a cancellation beats a suspension, and a suspension beats any problem.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from finetune_job.conditions import is_condition_true
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.gang.gpu_seconds import with_gpu_seconds
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.frozen_plan import PlanLost, frozen_plan
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import CONDITION, attempt_of, is_ended, is_started, is_terminal
from finetune_operator.decide.seen.times import active_deadline
from finetune_operator.decide.stages.blocked import delete_earlier_attempts
from finetune_operator.decide.stages.finish import conclude, finish_cancelled, finish_failed, retain, stop_deleted
from finetune_operator.decide.stages.preparation_stages import fetch_stage, preflight_stage
from finetune_operator.decide.stages.result_stages import merge_stage, publish_stage
from finetune_operator.decide.stages.stopped import awaits_retry, wait_for_retry
from finetune_operator.decide.stages.suspend import resume, suspend
from finetune_operator.decide.stages.train_stage import train_stage
from finetune_operator.decide.stages.validate_stage import REQUEUE_SECONDS, has_begun, missing_claims, validate_stage

_STAGES = {
    Role.FETCH: fetch_stage,
    Role.PREFLIGHT: preflight_stage,
    Role.TRAIN: train_stage,
    Role.MERGE: merge_stage,
    Role.PUBLISH: publish_stage,
}


def reconcile(observed: Observed, now: datetime) -> Actions:
    """Decide what to do about one FineTuneJob. `now`: a timezone-aware time in UTC."""
    actions = _decide(observed, now)
    if actions.status is None:
        return actions
    return replace(actions, status=with_gpu_seconds(observed, actions.status, now))


def _decide(observed: Observed, now: datetime) -> Actions:
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
        run = None if _waits_for_name(observed, result) else validate_stage(observed, result)
        if run is not None:
            _run_stages(observed, result, run)
    elif job.spec is None:
        result.stall(Reason.INVALID_SPEC, f"The manifest is not valid any more: {job.spec_error}")
    elif job.spec.run.suspend:
        suspend(observed, result)
    else:
        resume(observed, result)
        _reconcile_started(observed, result)
    return result.actions()


def _reconcile_started(observed: Observed, result: PassResult) -> None:
    """Continue a job that has started and is not suspended."""
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
    """Run the first stage that is not done. If it turns out to be done, run the next stage in the same pass, and so on."""
    for role, stage in _STAGES.items():
        if is_condition_true(observed.job.status.conditions, CONDITION[role]):
            continue
        if role is Role.FETCH and run.plan.fetch is None:
            result.condition(ConditionType.FETCHED, True, Reason.SKIPPED, "Model and data are on claims.")
            continue
        if wait_for_retry(observed, result, role) or not stage(observed, result, run):
            return


def _waits_for_name(observed: Observed, result: PassResult) -> bool:
    """Whether no child may be created, because its name is taken or there is a Job of a later attempt than status records."""
    if observed.vanishing:
        message = f"{', '.join(observed.vanishing)} of an earlier job of this name is still being deleted."
        result.condition(ConditionType.READY, False, Reason.PENDING, message)
        # This obstacle will disappear on its own, even if it has stalled the job before.
        result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
        result.requeue_after(REQUEUE_SECONDS)
        return True
    ahead = [job.name for job in observed.batch_jobs if job.attempt > attempt_of(observed.job.status, job.role)]
    if observed.conflicts:
        message = (
            f"{', '.join(observed.conflicts)} exists and does not belong to this job. Delete it, or give the job another name."
        )
    elif ahead:
        message = f"Job {', '.join(ahead)} is of a later attempt than status has. Was status restored from a backup? Delete it."
    else:
        return False
    result.stall(Reason.CONFLICT, message)
    result.requeue_after(REQUEUE_SECONDS)
    return True

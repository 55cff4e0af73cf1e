"""Ends a job (success, failure or cancellation), stops what is still running, and deletes what is not kept.

The outcome is final as soon as it is decided, and nothing is created after that. The job is finished once none of its pods can
run any more. After the time to live, only the FineTuneJob and its claims are left.
"""

from __future__ import annotations

from datetime import datetime

from finetune_job.conditions import find_condition, is_condition_true
from finetune_job.names import service_name
from finetune_job.reasons import STAGES, AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.failures.job_state import ends_by_itself
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.observed import JobView, Observed
from finetune_operator.decide.seen.stage import is_started, is_terminal
from finetune_operator.decide.seen.times import moment_after, timestamp

REQUEUE_SECONDS = 30.0
"""Pause between two checks while the last pods end. Normally events trigger passes; the checks make up for lost events."""


def finish_succeeded(observed: Observed, result: PassResult, message: str) -> None:
    """End a job whose stages are all done."""
    _end(observed, result, True, Reason.COMPLETED, message)


def finish_failed(observed: Observed, result: PassResult, reason: Reason, message: str) -> None:
    """End a job whose first unfinished stage has failed and will not be retried."""
    _end_unfinished(observed, result, reason, message, message)
    _end(observed, result, False, reason, message)


def finish_cancelled(observed: Observed, result: PassResult) -> None:
    """End a job that the user has cancelled."""
    message = "spec.run.cancel is true."
    _end_unfinished(observed, result, Reason.CANCELLED, message, "Cancelled.")
    _end(observed, result, False, Reason.CANCELLED, message)


def conclude(observed: Observed, result: PassResult) -> None:
    """Finish a job whose outcome is decided, as soon as none of its pods is running."""
    succeeded = find_condition(observed.job.status.conditions, ConditionType.SUCCEEDED)
    if succeeded is not None:
        # Another release, or somebody who edited the status, may have written a reason that this release does not know.
        known = next((reason for reason in Reason if reason == succeeded.reason), Reason.FAILED)
        _finish(observed, result, succeeded.status == "True", known, succeeded.message)


def _end(observed: Observed, result: PassResult, succeeded: bool, reason: Reason, message: str) -> None:
    result.condition(ConditionType.SUCCEEDED, succeeded, reason, message)
    result.condition(ConditionType.READY, False, reason, "")
    result.condition(ConditionType.STALLED, False, Reason.HEALTHY)
    result.condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED)
    result.emit("Normal" if succeeded or reason is Reason.CANCELLED else "Warning", reason, message)
    _finish(observed, result, succeeded, reason, message)


def _finish(observed: Observed, result: PassResult, succeeded: bool, reason: Reason, message: str) -> None:
    """Mark the job finished if it is certain that nothing is running: watches may not have shown all pods of a failed gang.

    After a success no live list is needed, because a Job that succeeded has no other pods.
    """
    stop_running(observed, result)
    running = still_running(observed)
    is_certain = succeeded or observed.live is not None or not is_started(observed.job.status)
    if is_certain and not running:
        result.set(completion_time=timestamp(result.now))
        result.condition(ConditionType.FINISHED, True, reason, message)
        return
    waits = f"Waiting until {running} has ended." if running else "Checking whether anything of it is still running."
    result.condition(ConditionType.FINISHED, False, Reason.STOPPING, waits)
    result.requeue_after(REQUEUE_SECONDS)


def _end_unfinished(observed: Observed, result: PassResult, reason: Reason, message: str, message_of_attempt: str) -> None:
    """End the first unfinished stage, and close the record of an attempt that is still running. If this pass has already closed
    the record, its evidence is kept.
    """
    status = observed.job.status
    stage = next((kind for kind in STAGES if not is_condition_true(status.conditions, kind)), None)
    if stage is not None:
        result.condition(stage, False, reason, message)
    if not result.has_value("attempts") and status.attempts and status.attempts[-1].outcome is AttemptOutcome.RUNNING:
        end = {"outcome": AttemptOutcome.FAILED, "end_time": timestamp(result.now), "message": message_of_attempt}
        result.set(attempts=[*status.attempts[:-1], status.attempts[-1].model_copy(update=end)])


def stop_running(observed: Observed, result: PassResult) -> None:
    """Delete the Jobs that are still running. Jobs that ended on their own are kept for inspection, with their pods and logs."""
    for batch_job in observed.batch_jobs:
        if not ends_by_itself(batch_job, observed.pods_of(batch_job.role, batch_job.attempt)):
            result.delete(batch_job)
    if observed.live is None:
        return
    # The live list also shows what no watch does, because somebody removed the label or deleted the Job with the policy Orphan.
    known = {batch_job.uid for batch_job in observed.batch_jobs}
    for job in observed.live.batch_jobs:
        if job.uid not in known and not job.deleting:
            result.delete_object("Job", job.name, job.uid)
    for pod in observed.live.running_pods:
        if pod.orphaned and pod.deletion_due is None:
            result.delete_object("Pod", pod.name, pod.uid)


def stop_deleted(observed: Observed, result: PassResult) -> None:
    """Stop a job that was deleted but is kept by a finalizer, because soon nothing will manage its children. Creates nothing."""
    stop_running(observed, result)
    running = still_running(observed)
    waits = f"Waiting until {running} has ended." if running else "Everything that it ran has ended."
    message = f"The job is being deleted, and a finalizer keeps it. {waits}"
    for kind in (ConditionType.READY, ConditionType.FINISHED):
        result.condition(kind, False, Reason.STOPPING, message)
    if running:
        result.requeue_after(REQUEUE_SECONDS)


def still_running(observed: Observed) -> str:
    """List the pods of an ended job that can still run, with their nodes, or else its Jobs; empty if nothing can run."""
    jobs = [f"Job {job.name}" for job in observed.batch_jobs if not ends_by_itself(job, observed.pods_of(job.role, job.attempt))]
    nodes = {pod.name: pod.node for pod in observed.pods if not pod.is_terminal}
    if observed.live is not None:
        nodes |= {pod.name: pod.node for pod in observed.live.running_pods}
        jobs += [
            f"Job {job.name}"
            for job in observed.live.batch_jobs
            if job.uid not in {batch_job.uid for batch_job in observed.batch_jobs}
        ]
    pods = [f"pod {name} on node {node or 'unknown'}" for name, node in nodes.items()]
    return ", ".join((pods or jobs)[:4])


def retain(observed: Observed, result: PassResult) -> None:
    """Delete Jobs that are still running and, once the time to live is over, all children except claims. Creates nothing."""
    stop_running(observed, result)
    end = _end_of_life(observed.job)
    if end is None:
        return
    if result.now < end:
        result.requeue_at(end)
        return
    for batch_job in observed.batch_jobs:
        result.delete(batch_job)
    if observed.service_exists:
        result.delete_object("Service", service_name(observed.job.name), observed.service_uid)
    for policy in observed.network_policies:
        result.delete_object("NetworkPolicy", policy.name, policy.uid)
    # Delete the plan last: as long as it exists, the NetworkPolicies, which are not watched, are still looked up.
    if observed.plan is not None:
        result.delete_object("ConfigMap", observed.plan.name, observed.plan.uid)


def has_expired(observed: Observed, now: datetime) -> bool:
    """Whether the time to live of a job is over and something is left to be deleted."""
    end = _end_of_life(observed.job) if is_terminal(observed.job.status) else None
    return end is not None and now >= end and bool(observed.plan or observed.batch_jobs or observed.service_exists)


def _end_of_life(job: JobView) -> datetime | None:
    ttl = job.spec.run.ttl_seconds_after_finished if job.spec is not None else None
    return moment_after(job.status.completion_time, ttl) if ttl is not None else None

"""What is left of a job that has ended: nothing runs, and after its time to live nothing but the FineTuneJob and its claims."""

from __future__ import annotations

from finetune_job.names import service_name
from finetune_operator.decide.clock import moment_after
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.standing import ends_by_itself


def stop_running(observed: Observed, draft: Draft) -> None:
    """Delete the Jobs that still run. What ended by itself stays for inspection, with its pods and their logs."""
    for batch_job in observed.batch_jobs:
        if not ends_by_itself(batch_job, observed.pods_of(batch_job.role, batch_job.attempt)):
            draft.delete(batch_job)


def still_running(observed: Observed) -> str:
    """What of an ended job can still run, on which nodes; empty: nothing."""
    jobs = [f"Job {job.name}" for job in observed.batch_jobs if not ends_by_itself(job, observed.pods_of(job.role, job.attempt))]
    pods = [f"pod {pod.name} on node {pod.node or 'unknown'}" for pod in observed.pods if not pod.is_terminal]
    return ", ".join((pods or jobs)[:4])


def retain(observed: Observed, draft: Draft) -> None:
    """Delete Jobs that still run, and every child once the time to live is over. Creates nothing."""
    job = observed.job
    stop_running(observed, draft)
    ttl = job.spec.run.ttl_seconds_after_finished if job.spec is not None else None
    end = moment_after(job.status.completion_time, ttl) if ttl is not None else None
    if end is None:
        return
    if draft.now < end:
        draft.wake_at(end)
        return
    for batch_job in observed.batch_jobs:
        draft.delete(batch_job)
    if observed.service_exists:
        draft.delete_object("Service", service_name(job.name), "")
    if observed.plan is not None:
        draft.delete_object("ConfigMap", observed.plan.name, observed.plan.uid)

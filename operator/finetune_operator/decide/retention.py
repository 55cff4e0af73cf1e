"""What is left of a job that has ended: nothing runs, and after its time to live nothing but the FineTuneJob and its claims."""

from __future__ import annotations

from finetune_job.names import service_name
from finetune_operator.decide.clock import moment_after
from finetune_operator.decide.job_state import ends_by_itself
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.pass_result import PassResult


def stop_running(observed: Observed, result: PassResult) -> None:
    """Delete the Jobs that still run. What ended by itself stays for inspection, with its pods and their logs."""
    for batch_job in observed.batch_jobs:
        if not ends_by_itself(batch_job, observed.pods_of(batch_job.role, batch_job.attempt)):
            result.delete(batch_job)
    if observed.live is None:
        return
    # What no watch shows: somebody has taken the label off, or deleted the Job with the policy Orphan.
    known = {batch_job.uid for batch_job in observed.batch_jobs}
    for job in observed.live.batch_jobs:
        if job.uid not in known and not job.deleting:
            result.delete_object("Job", job.name, job.uid)
    for pod in observed.live.running_pods:
        if pod.orphaned and pod.deletion_due is None:
            result.delete_object("Pod", pod.name, pod.uid)


def still_running(observed: Observed) -> str:
    """What of an ended job can still run, on which nodes; empty: nothing."""
    jobs = [f"Job {job.name}" for job in observed.batch_jobs if not ends_by_itself(job, observed.pods_of(job.role, job.attempt))]
    nodes = {pod.name: pod.node for pod in observed.pods if not pod.is_terminal}
    if observed.live is not None:
        nodes |= {pod.name: pod.node for pod in observed.live.running_pods}
        jobs += [f"Job {job.name}" for job in observed.live.batch_jobs if job.uid not in {one.uid for one in observed.batch_jobs}]
    pods = [f"pod {name} on node {node or 'unknown'}" for name, node in nodes.items()]
    return ", ".join((pods or jobs)[:4])


def retain(observed: Observed, result: PassResult) -> None:
    """Delete Jobs that still run, and every child once the time to live is over. Creates nothing."""
    job = observed.job
    stop_running(observed, result)
    ttl = job.spec.run.ttl_seconds_after_finished if job.spec is not None else None
    end = moment_after(job.status.completion_time, ttl) if ttl is not None else None
    if end is None:
        return
    if result.now < end:
        result.requeue_at(end)
        return
    for batch_job in observed.batch_jobs:
        result.delete(batch_job)
    if observed.service_exists:
        result.delete_object("Service", service_name(job.name), "")
    if observed.plan is not None:
        result.delete_object("ConfigMap", observed.plan.name, observed.plan.uid)

"""What is left of earlier attempts: it is deleted, and nothing new starts beside it.

Before a Job that may not be the first of its kind is created, a live list without label selector must show no other Job and no
pod that can still run: a filtered watch reports a deletion when somebody merely removes a label.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.names import Role, batch_job_name
from finetune_job.reasons import Reason
from finetune_job.status.conditions import find
from finetune_operator.decide.job_state import OVERDUE_GRACE
from finetune_operator.decide.observed import LivePod, Observed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.stage import CONDITION, attempt_of, current_role, is_ended, is_started, is_terminal

_NEVER_CREATED = frozenset({Reason.NOT_OBSERVED, Reason.PENDING, Reason.CREATE_REFUSED})


def delete_earlier_attempts(observed: Observed, result: PassResult) -> None:
    """Delete Jobs whose number has been passed on: the status says so already, whoever was to delete them."""
    for batch_job in observed.batch_jobs:
        if batch_job.attempt < attempt_of(observed.job.status, batch_job.role):
            result.delete(batch_job)


def needs_live_list(observed: Observed) -> bool:
    """Whether the next step may only be taken after a live list has shown that nothing of what was created runs.

    The next Job is created by it, but for the first of a role that no pass has decided to create yet; and a job whose end has to
    wait for its pods is finished by it.
    """
    status, spec = observed.job.status, observed.job.spec
    if is_ended(status):
        return is_started(status) and not is_terminal(status)
    if not is_started(status) or spec is None or spec.run.suspend:
        return False
    role = current_role(status)
    attempt = attempt_of(status, role)
    condition = find(status.conditions, CONDITION[role])
    was_decided = condition is not None and condition.reason not in _NEVER_CREATED
    return (attempt > 0 or was_decided) and observed.batch_job(role, attempt) is None


@dataclass(frozen=True)
class Remains:
    """What still has to disappear before the next Job may be created."""

    text: str
    blocked: tuple[LivePod, ...] = ()
    """Pods whose grace period is over: their nodes do not answer."""


def remains(observed: Observed, result: PassResult, role: Role, nodes: int) -> Remains | None:
    """Delete what a live list has shown of earlier attempts, by UID, and say what is left; None: nothing is."""
    status = observed.job.status
    attempt = attempt_of(status, role)
    if attempt == 0 and not needs_live_list(observed):
        return None
    if observed.live is None:
        return Remains("The pods of the earlier attempt have not been looked up yet.")
    known = {job.name: job for job in observed.batch_jobs}
    others = [job for job in observed.live.batch_jobs if job.name not in known or known[job.name].role is role]
    wanted = batch_job_name(observed.job.name, role, attempt, nodes)
    for job in others:
        if not job.deleting and job.name != wanted:
            result.delete_object("Job", job.name, job.uid)
    pods = observed.live.running_pods
    if not others:
        # Their Job is gone without them: somebody deleted it with the policy Orphan. What still has a controller, the garbage
        # collector deletes, or it is not ours: a label proves nothing.
        for pod in pods:
            if pod.orphaned and pod.deletion_due is None:
                result.delete_object("Pod", pod.name, pod.uid)
    left = [f"Job {job.name}" for job in others] + [f"pod {pod.name}" for pod in pods]
    if not left:
        return None
    blocked = tuple(pod for pod in pods if pod.deletion_due is not None and result.now >= pod.deletion_due + OVERDUE_GRACE)
    return Remains(f"Waiting until the earlier attempt is gone: {', '.join(left[:4])}.", blocked)

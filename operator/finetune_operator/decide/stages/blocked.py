"""Obstacles to the creation of a child: leftovers of earlier attempts, or an API server that refuses the write.

Unless a Job is certainly the first of its role, it is created only once a live list without label selector shows no other Job and
no pod that can still run: to a watch with a selector, the removal of a label looks like a deletion.
"""

from __future__ import annotations

from datetime import timedelta

from finetune_job.conditions import find_condition
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.failures.job_state import OVERDUE_GRACE, is_quota
from finetune_operator.decide.gang.attempts import latest_of
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.children_seen import LivePod
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import CONDITION, attempt_of, current_role, is_ended, is_started, is_terminal
from finetune_operator.decide.seen.times import moment_after

_NEVER_CREATED = frozenset({Reason.NOT_OBSERVED, Reason.PENDING, Reason.CREATE_REFUSED})
FIRST_LOOK_SECONDS = 5.0
LONGEST_LOOK_SECONDS = 60.0
"""Bounds of the pause between two checks whether an earlier attempt is gone; the pause grows with the time waited."""
QUIET_SECONDS = 30.0
"""How long an earlier attempt may take to end before status reports that it is still there."""
BLOCKED_SECONDS = 1800.0
"""How long a node may not answer before a human has to act."""


def delete_earlier_attempts(observed: Observed, result: PassResult) -> None:
    """Delete the Jobs of attempts with a lower number than in status, in case an earlier pass failed to delete them."""
    for batch_job in observed.batch_jobs:
        attempt = attempt_of(observed.job.status, batch_job.role)
        if batch_job.attempt < attempt and batch_job != observed.batch_job(batch_job.role, attempt):
            result.delete(batch_job)


def needs_live_list(observed: Observed) -> bool:
    """Whether the next step requires a live list, to be sure that no earlier child is still running.

    A list is needed before a Job is created, unless it is the first of its role and no pass has decided to create it yet; before
    an ended job is marked finished; and while a job is being deleted or suspended, as none of its pods may run then.
    """
    status, spec = observed.job.status, observed.job.spec
    if is_ended(status):
        return is_started(status) and not is_terminal(status)
    if observed.job.deleting:
        # Once the watches show no more Jobs, a live list looks for children that the watches do not show.
        return is_started(status) and not observed.batch_jobs
    if not is_started(status) or spec is None:
        return False
    role = current_role(status)
    attempt = attempt_of(status, role)
    condition = find_condition(status.conditions, CONDITION[role])
    was_decided = condition is not None and condition.reason not in _NEVER_CREATED
    return (attempt > 0 or was_decided or spec.run.suspend) and observed.batch_job(role, attempt) is None


def delete_leftovers(observed: Observed, result: PassResult, role: Role) -> bool:
    """Delete by UID the Jobs and pods in a live list that belong to earlier attempts, or to this one but lost their label.
    Returns whether the next Job must wait for them; status reports a wait that is long or due to an unresponsive node.
    """
    status = observed.job.status
    attempt = attempt_of(status, role)
    if attempt == 0 and not needs_live_list(observed):
        return False
    if observed.live is None:
        result.requeue_after(FIRST_LOOK_SECONDS)
        return True
    known = {job.name: job for job in observed.batch_jobs}
    others = [job for job in observed.live.batch_jobs if job.name not in known or known[job.name].role is role]
    for job in others:
        if not job.deleting:
            result.delete_object("Job", job.name, job.uid)
    pods = observed.live.running_pods
    if not others:
        # These pods' Job was deleted with the policy Orphan. Pods that still have a controller are left to the garbage collector
        # or are not ours, because a label proves nothing.
        for pod in pods:
            if pod.orphaned and pod.deletion_due is None:
                result.delete_object("Pod", pod.name, pod.uid)
    left = [f"Job {job.name}" for job in others] + [f"pod {pod.name}" for pod in pods]
    if not left:
        return False
    latest = latest_of(status, role)
    ended = moment_after(latest.end_time, 0.0) if latest is not None else None
    waited = (result.now - ended).total_seconds() if ended is not None else QUIET_SECONDS
    result.requeue_after(min(max(FIRST_LOOK_SECONDS, waited / 4), LONGEST_LOOK_SECONDS))
    # A pod that outlives its grace period is on a node that does not answer.
    blocked = tuple(pod for pod in pods if pod.deletion_due is not None and result.now >= pod.deletion_due + OVERDUE_GRACE)
    if blocked:
        _blocked_on_nodes(observed, result, role, blocked)
    elif waited >= QUIET_SECONDS:
        message = f"Waiting until the earlier attempt is gone: {', '.join(left[:4])}."
        result.condition(CONDITION[role], None, Reason.RESTARTING, message)
        result.condition(ConditionType.READY, False, Reason.RESTARTING, message)
    return True


def _blocked_on_nodes(observed: Observed, result: PassResult, role: Role, pods: tuple[LivePod, ...]) -> None:
    place = ", ".join(f"pod {pod.name} on node {pod.node or 'unknown'}" for pod in pods[:4])
    # Use the current profile, not the frozen one: if an administrator withdraws this permission, it must take effect at once.
    profile = observed.profile.spec
    if profile is not None and profile.force_delete_pods_of_lost_nodes:
        for pod in pods:
            result.delete_object("Pod", pod.name, pod.uid, force=True)
        message = f"{place}: the node does not answer, so the pod is deleted by force, as the profile demands."
    else:
        message = (
            f"{place}: the node does not answer, and the old rank may still write checkpoints. Once the node is certainly down, "
            "add the taint node.kubernetes.io/out-of-service to it, or delete the pod by force."
        )
    result.condition(CONDITION[role], None, Reason.BLOCKED_ON_NODE, message)
    result.condition(ConditionType.READY, False, Reason.BLOCKED_ON_NODE, message)
    result.warn_once(CONDITION[role], Reason.BLOCKED_ON_NODE, message)
    since = min(pod.deletion_due for pod in pods if pod.deletion_due is not None)
    limit = since + timedelta(seconds=BLOCKED_SECONDS)
    if result.now >= limit:
        result.stall(Reason.BLOCKED_ON_NODE, message)
    else:
        result.requeue_at(limit)


def wait_for_refused_write(observed: Observed, result: PassResult, kind: ConditionType, fix: str = "") -> bool:
    """Whether the API server has refused to create or change a child, and it is too early to ask again. After a refusal, the
    condition `kind` gets the server's message, followed by `fix`.

    If a quota was the reason, the operator waits; any other refusal needs a human.
    """
    refused = observed.refused
    if refused is None:
        return False
    message = f"{refused.kind} {refused.name} was refused by the API server ({refused.code}): {refused.message} {fix}".rstrip()
    result.condition(kind, None, Reason.CREATE_REFUSED, message)
    result.condition(ConditionType.READY, False, Reason.CREATE_REFUSED, message)
    if is_quota(refused.message):
        result.warn_once(kind, Reason.CREATE_REFUSED, message)
    else:
        result.stall(Reason.CREATE_REFUSED, message)
    if result.now >= refused.retry_at:
        return False
    result.requeue_at(refused.retry_at)
    return True

"""What keeps a child from being created: an earlier attempt that does not go away, or an API server that refuses it."""

from __future__ import annotations

from datetime import timedelta

from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.attempts import latest_of
from finetune_operator.decide.clock import moment_after
from finetune_operator.decide.earlier_attempts import Remains
from finetune_operator.decide.observed import LivePod, Observed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.pending import is_quota
from finetune_operator.decide.stage import CONDITION

FIRST_LOOK_SECONDS = 5.0
LONGEST_LOOK_SECONDS = 60.0
"""While an earlier attempt disappears, it is looked at after so many seconds, the longer the rarer."""
QUIET_SECONDS = 30.0
"""An earlier attempt that takes so long to end is not worth a status write."""
BLOCKED_SECONDS = 1800.0
"""A node that does not answer for so long needs a human."""


def report_remains(observed: Observed, result: PassResult, role: Role, left: Remains) -> None:
    """Wait until the earlier attempt is gone, and say so if it takes long or a node does not answer."""
    if observed.live is None:
        result.requeue_after(FIRST_LOOK_SECONDS)
        return
    latest = latest_of(observed.job.status, role)
    ended = moment_after(latest.end_time, 0.0) if latest is not None else None
    waited = (result.now - ended).total_seconds() if ended is not None else QUIET_SECONDS
    result.requeue_after(min(max(FIRST_LOOK_SECONDS, waited / 4), LONGEST_LOOK_SECONDS))
    if left.blocked:
        _blocked_on_nodes(observed, result, role, left.blocked)
    elif waited >= QUIET_SECONDS:
        result.condition(CONDITION[role], None, Reason.RESTARTING, left.text)
        result.condition(ConditionType.READY, False, Reason.RESTARTING, left.text)


def _blocked_on_nodes(observed: Observed, result: PassResult, role: Role, pods: tuple[LivePod, ...]) -> None:
    place = ", ".join(f"pod {pod.name} on node {pod.node or 'unknown'}" for pod in pods[:4])
    # The profile as it is now, not as it was frozen: whoever takes this back means it at once.
    profile = observed.profile.spec
    if profile is not None and profile.force_delete_pods_of_lost_nodes:
        for pod in pods:
            result.delete_object("Pod", pod.name, pod.uid, force=True)
        said = f"{place}: the node does not answer, and the profile has the pod deleted by force."
    else:
        said = (
            f"{place}: the node does not answer, and the old rank may still write checkpoints. Once the node is certainly down, "
            "add the taint node.kubernetes.io/out-of-service to it, or delete the pod by force."
        )
    result.condition(CONDITION[role], None, Reason.BLOCKED_ON_NODE, said)
    result.condition(ConditionType.READY, False, Reason.BLOCKED_ON_NODE, said)
    result.warn_once(CONDITION[role], Reason.BLOCKED_ON_NODE, said)
    since = min(pod.deletion_due for pod in pods if pod.deletion_due is not None)
    limit = since + timedelta(seconds=BLOCKED_SECONDS)
    if result.now >= limit:
        result.stall(Reason.BLOCKED_ON_NODE, said)
    else:
        result.requeue_at(limit)


def wait_for_refused_write(observed: Observed, result: PassResult, kind: ConditionType, fix: str = "") -> bool:
    """Whether the API server has refused a child or a change of one and is not to be asked again yet. The condition `kind` then has
    its words, and `fix` if there is one to name.

    A quota is waited for; anything else needs a human.
    """
    refused = observed.refused
    if refused is None:
        return False
    said = f"{refused.kind} {refused.name} was refused by the API server ({refused.code}): {refused.message} {fix}".rstrip()
    result.condition(kind, None, Reason.CREATE_REFUSED, said)
    result.condition(ConditionType.READY, False, Reason.CREATE_REFUSED, said)
    if is_quota(refused.message):
        result.warn_once(kind, Reason.CREATE_REFUSED, said)
    else:
        result.stall(Reason.CREATE_REFUSED, said)
    if result.now >= refused.retry_at:
        return False
    result.requeue_at(refused.retry_at)
    return True

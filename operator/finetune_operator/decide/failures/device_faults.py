"""Decides by a node's conditions whether a GPU broke while training ran there.

GPU monitors (NVSentinel, the node problem detector, a cloud provider's agent) set a condition on the node. To the ranks, such a
fault looks like a failed operation or a silent peer, which would count against the job.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_job.api.profile import NodeCondition
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_operator.decide.failures.classify import Failure
from finetune_operator.decide.failures.job_state import JobState, ends_by_itself
from finetune_operator.decide.failures.restart_policy import POLICY
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import attempt_of, current_role, is_ended

MOST_NODES = 64
"""Maximum number of nodes to read for one attempt."""
_UNEXPLAINED = frozenset({FailureClass.INTERNAL, FailureClass.COLLECTIVE, FailureClass.STALLED, FailureClass.UNKNOWN})
"""Failure classes that ranks may report when a GPU has broken."""


def nodes_in_question(observed: Observed) -> tuple[str, ...]:
    """Return the nodes of a failing training attempt, if the profile names conditions that could explain the failure."""
    status = observed.job.status
    if not _wanted(observed) or is_ended(status) or current_role(status) is not Role.TRAIN:
        return ()
    attempt = attempt_of(status, Role.TRAIN)
    batch_job, pods = observed.batch_job(Role.TRAIN, attempt), observed.pods_of(Role.TRAIN, attempt)
    if batch_job is None or batch_job.has("Complete", "SuccessCriteriaMet") or not ends_by_itself(batch_job, pods):
        return ()
    return tuple(sorted({pod.node for pod in pods if pod.node}))[:MOST_NODES]


def with_device_fault(observed: Observed, current: JobState) -> JobState:
    """Change the class of a failure to DeviceFault if one of the attempt's nodes has a condition that explains it."""
    failure = current.failure
    if failure is None or failure.failure not in _UNEXPLAINED or not current.pods:
        return current
    since = min(pod.created for pod in current.pods)
    wanted = {(condition.type, condition.status) for condition in _wanted(observed)}
    faults = [
        f"node {node.name} has the condition {condition.type}={condition.status}: {condition.reason} {condition.message}".rstrip()
        for node in observed.nodes
        for condition in node.conditions
        # A condition that is older than the pods does not explain the failure.
        if (condition.type, condition.status) in wanted and condition.since is not None and condition.since >= since
    ]
    if not faults:
        return current
    message = f"{faults[0]}. The ranks saw: {failure.failure}: {failure.message}"
    hint = POLICY[FailureClass.DEVICE_FAULT].advice
    return replace(current, failure=Failure(FailureClass.DEVICE_FAULT, message, hint, failure.evidence))


def _wanted(observed: Observed) -> list[NodeCondition]:
    spec = observed.profile.spec
    return spec.gpu.fault_conditions if spec is not None and spec.gpu is not None else []

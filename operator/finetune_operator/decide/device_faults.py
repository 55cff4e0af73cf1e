"""Whether a node's own conditions say that a GPU of it broke while training ran there: decisions over plain data.

Who watches GPUs (NVSentinel, the node problem detector, an agent of the cloud) writes a condition on the node. Ranks see of the
same fault only that an operation failed or a peer went silent, which would be counted against the job.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from finetune_job.api.profile import NodeCondition
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.job_state import JobState, ends_by_itself
from finetune_operator.decide.observed import NodeConditionView, Observed
from finetune_operator.decide.restart_policy import POLICY
from finetune_operator.decide.stage import attempt_of, current_role, is_ended

MOST_NODES = 64
"""That are looked at for one attempt."""
_UNEXPLAINED = frozenset({FailureClass.INTERNAL, FailureClass.COLLECTIVE, FailureClass.STALLED, FailureClass.UNKNOWN})
"""What a broken GPU looks like to a rank, and to its peers."""


def nodes_in_question(observed: Observed) -> tuple[str, ...]:
    """Nodes of training pods that fail now, if the profile names conditions that could tell why."""
    status = observed.job.status
    if not _wanted(observed) or is_ended(status) or current_role(status) is not Role.TRAIN:
        return ()
    attempt = attempt_of(status, Role.TRAIN)
    batch_job, pods = observed.batch_job(Role.TRAIN, attempt), observed.pods_of(Role.TRAIN, attempt)
    if batch_job is None or batch_job.has("Complete", "SuccessCriteriaMet") or not ends_by_itself(batch_job, pods):
        return ()
    return tuple(sorted({pod.node for pod in pods if pod.node}))[:MOST_NODES]


def with_device_fault(observed: Observed, found: JobState) -> JobState:
    """The same, with DeviceFault as the class of a failure that such a condition explains."""
    failure = found.failure
    if failure is None or failure.failure not in _UNEXPLAINED or not found.pods:
        return found
    since = min(pod.created for pod in found.pods)
    told = [
        f"node {node.name} has the condition {one.type}={one.status}: {one.reason} {one.message}".rstrip()
        for node in observed.nodes
        for one in node.conditions
        if _tells_of_a_fault(one, _wanted(observed), since)
    ]
    if not told:
        return found
    said = f"{told[0]}. The ranks saw: {failure.failure}: {failure.message}"
    hint = POLICY[FailureClass.DEVICE_FAULT].advice
    return replace(found, failure=Failure(FailureClass.DEVICE_FAULT, said, hint, failure.evidence))


def _wanted(observed: Observed) -> list[NodeCondition]:
    spec = observed.profile.spec
    return spec.gpu.fault_conditions if spec is not None and spec.gpu is not None else []


def _tells_of_a_fault(found: NodeConditionView, wanted: list[NodeCondition], since: datetime) -> bool:
    """Whether it is one of these, and has come since. One that was there before explains no failure of now."""
    is_wanted = any((one.type, one.status) == (found.type, found.status) for one in wanted)
    return is_wanted and found.since is not None and found.since >= since

"""A queue that admits fewer pods of an elastic gang than were asked for (Kueue's partial admission).

It lowers the parallelism of the Job in the moment in which it lets it go, when the arguments of its pods are written already. So
the pods take their number from a ConfigMap that is made in the pass that sees the Job go, and until then no container starts. A
Job that is suspended has its parallelism back, and may come back with another: its pods must not read the number of before, and
must not start while a pod of before can still run, for which the Job controller waits only if its index is needed again.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_job.failures import FailureClass
from finetune_job.names import gang_configmap_name
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun, Owner
from finetune_operator.children.train_job import gang_configmap
from finetune_operator.decide.blocked import wait_for_refused_write
from finetune_operator.decide.children_seen import BatchJobView, GangNodesView
from finetune_operator.decide.elastic import Elasticity
from finetune_operator.decide.job_state import OVERDUE_GRACE, JobState, Pending
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.role_stage import RoleStage

_FIX_OF_TELLING = "Its pods wait for the ConfigMap with their number."


def admitted_nodes(limits: Elasticity, asked: int, batch_job: BatchJobView | None) -> int:
    """Pods of an attempt: those that its queue has admitted, or else those that are asked for."""
    if batch_job is None or not batch_job.takes_fewer or batch_job.parallelism is None:
        return asked
    return limits.clamped(batch_job.parallelism)


def follow_admission(observed: Observed, stage: RoleStage, run: FrozenRun, found: JobState, batch_job: BatchJobView) -> bool:
    """Let the pods know how many they are. Returns whether this pass is over: they are not to be told yet, or the attempt ends
    because some of them may have read another number.
    """
    told, result = observed.gang_nodes, stage.result
    if not batch_job.takes_fewer:
        return False
    if told is not None and (batch_job.suspended or told.attempt != stage.attempt):
        _forget(stage, told)
    elif batch_job.suspended:
        return False
    elif told is None:
        if _waits_for_earlier_pods(observed, stage, found, batch_job):
            return True
        if wait_for_refused_write(observed, result, ConditionType.TRAINED, _FIX_OF_TELLING):
            return True
        result.create(gang_configmap(run.owner, stage.attempt, stage.nodes))
    elif told.nodes != stage.nodes:
        # It was suspended and let go while nobody looked.
        _forget(stage, told)
        said = f"The queue has admitted {stage.nodes} pods of an attempt that began with {told.nodes}."
        stage.resize(stage.nodes, said, batch_job)
        return True
    return False


def _waits_for_earlier_pods(observed: Observed, stage: RoleStage, found: JobState, batch_job: BatchJobView) -> bool:
    """Whether pods that a suspension was to end still run; if one does not end in time, the next attempt deals with its node."""
    current = {pod.uid for pod in found.pods}
    left = [pod for pod in observed.pods_of(stage.role, stage.attempt) if pod.uid not in current and not pod.is_terminal]
    if not left:
        return False
    pod = left[0]
    until = (pod.deletion_due or stage.result.now) + OVERDUE_GRACE
    said = f"{pod.name} on node {pod.node or 'unknown'} is still to end, from before the queue took the Job back."
    if stage.result.now >= until:
        stage.resize(stage.nodes, said, batch_job)
        return True
    stage.set_reason(Reason.WAITING_FOR_PODS, said)
    stage.result.condition(ConditionType.READY, False, Reason.WAITING_FOR_PODS, said)
    stage.result.requeue_at(until)
    return True


def quiet_until_told(found: JobState, owner: Owner) -> JobState:
    """The same, without the kubelet's warning that the ConfigMap is missing, which is how the pods wait for it."""
    if found.pending is None or found.pending.reason is not Reason.MOUNT_FAILED:
        return found
    name = gang_configmap_name(owner.name)
    waiting = [pod for pod in found.pods if pod.waiting_reason == "CreateContainerConfigError"]
    if not waiting or any(name not in pod.waiting_message for pod in waiting):
        return found
    said = f"{waiting[0].name} waits to be told how many pods there are: {waiting[0].waiting_message}"
    return replace(found, pending=Pending(Reason.WAITING_FOR_PODS, said, failure=FailureClass.MOUNT))


def _forget(stage: RoleStage, told: GangNodesView) -> None:
    stage.result.delete_object("ConfigMap", told.name, told.uid)
    stage.result.requeue_after(1.0)

"""Training: one Indexed Job per attempt of the gang, and the restart from the last checkpoint after a failure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.placement import PREFLIGHT_GATE
from finetune_operator.children.train_job import gang_service, train_job
from finetune_operator.decide.attempts import GangSize
from finetune_operator.decide.blocked import wait_for_refused_write
from finetune_operator.decide.children_seen import BatchJobView
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.device_faults import with_device_fault
from finetune_operator.decide.elastic import (
    Elasticity,
    elasticity,
    gang_nodes,
    grows,
    nodes_after_failure,
    nodes_that_came,
    nodes_to_queue_for,
    queued_since,
)
from finetune_operator.decide.frozen_plan import PlanLost, frozen_plan
from finetune_operator.decide.job_state import JobState, State
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.progress import progress_of_facts, progress_status
from finetune_operator.decide.restart_policy import POLICY
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.same_pod import await_restart, pods_to_tell, unless_label_refused
from finetune_operator.decide.stage import current_role
from finetune_operator.decide.times import stall_deadline

_FIX_OF_UNGATING = "The operator has to take the gate off the Job: install the chart with kueue.patchJobs=true."


def train_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """One pass while the job is prepared and not trained. Returns whether the next stage may begin."""
    limits, ranks = elasticity(run.plan), run.plan.parallelism
    nodes = gang_nodes(run.plan, observed.job.status.gang_nodes)
    size = None if limits is None else GangSize(nodes, nodes * ranks.processes_per_node)
    stage = RoleStage(observed, result, Role.TRAIN, nodes, ranks.nodes, size)
    current = with_device_fault(observed, stage.job_state())
    current = unless_label_refused(observed, await_restart(observed, current, stage.attempt, result.now), stage.attempt)
    if current.failure is None:
        for pod in pods_to_tell(observed, stage.attempt):
            result.relabel(pod, stage.attempt)
    _report_progress(observed, result, stage.attempt)
    if current.state is State.ABSENT:
        _create(observed, stage, run)
    elif current.state is State.SUCCEEDED:
        _succeeded(observed, result, stage, current)
        return True
    elif current.failure is not None:
        after = None if limits is None else nodes_after_failure(limits, nodes, current.pods)
        stage.fail(current.failure, current.batch_job, after)
    elif current.batch_job is not None:
        if not observed.service_exists:
            result.create(gang_service(run.owner))
        # A gate on a Job that runs holds nothing back: anybody may have written it there.
        if current.state is State.QUEUED and PREFLIGHT_GATE in current.batch_job.admission_gates:
            if not wait_for_refused_write(observed, result, ConditionType.TRAINED, _FIX_OF_UNGATING):
                result.ungate(current.batch_job, PREFLIGHT_GATE)
        elif not (
            (limits is not None and _is_resized(observed, stage, limits, current, current.batch_job))
            or _is_stalled(observed, result, stage, current, current.batch_job)
        ):
            stage.wait(current, current.batch_job)
    return False


def queue_of_growth(observed: Observed, now: datetime) -> str | None:
    """The LocalQueue of a gang that would grow now. It grows if no Workload waits there (`waiting_in_queue`)."""
    status = observed.job.status
    if observed.progress is None or not status.gang_nodes or current_role(status) is not Role.TRAIN:
        return None
    run = frozen_plan(observed)
    limits = None if isinstance(run, PlanLost) else elasticity(run.plan)
    if isinstance(run, PlanLost) or limits is None or not limits.is_queued:
        return None
    is_due = grows(limits, status.gang_nodes, status.attempts, now, progress=observed.progress, before=status.progress)
    return run.placement.pods.train.queue_name if is_due else None


def _is_resized(observed: Observed, stage: RoleStage, limits: Elasticity, current: JobState, batch_job: BatchJobView) -> bool:
    """End the attempt to continue on the nodes that it got, or to ask for fewer or for all of them. Returns whether it ended."""
    now, status = stage.result.now, observed.job.status
    waited = limits.shrink_after.total_seconds()
    if current.state is State.QUEUED:
        since = queued_since(status, batch_job)
        fewer = nodes_to_queue_for(limits, stage.nodes, status.attempts, since, now)
        if fewer is not None:
            stage.resize(fewer, f"The queue has not admitted {stage.nodes} pods within {waited:.0f} s.", batch_job)
            return True
        if now < since + limits.shrink_after:
            stage.result.requeue_at(since + limits.shrink_after)
    if current.state is State.WAITING and current.pending is not None and current.pending.is_capacity:
        since = batch_job.start_time or batch_job.created
        came = nodes_that_came(limits, stage.nodes, current.pods, since, now)
        if came is not None:
            stage.resize(came, f"{came} of {stage.nodes} pods had a node within {waited:.0f} s.", batch_job)
            return True
        if now < since + limits.shrink_after:
            stage.result.requeue_at(since + limits.shrink_after)
    progress = observed.progress if observed.progress is not None and observed.progress.attempt == stage.attempt else None
    may_grow = current.state is State.RUNNING and (not limits.is_queued or observed.waiting_in_queue == 0)
    if may_grow and grows(limits, stage.nodes, status.attempts, now, progress=progress, before=status.progress):
        stage.resize(limits.most, f"Attempt {stage.attempt} has saved and may grow.", batch_job)
        return True
    return False


def _create(observed: Observed, stage: RoleStage, run: FrozenRun) -> None:
    """Create the Service before the Job: without it the names of the ranks do not resolve."""

    def build() -> list[Mapping[str, Any]]:
        job = train_job(run, stage.attempt, stage.nodes)
        return [job] if observed.service_exists else [gang_service(run.owner), job]

    stage.create(build)


def _is_stalled(observed: Observed, result: PassResult, stage: RoleStage, current: JobState, batch_job: BatchJobView) -> bool:
    """Fail the attempt if its pods run and no new step has come for too long. Returns whether it failed."""
    spec, status = observed.job.spec, observed.job.status
    if current.state is not State.RUNNING or spec is None or result.has_value("progress"):
        return False
    deadline = stall_deadline(spec.run, status, current.pods, stage.nodes)
    if deadline is None:
        return False
    if result.now < deadline:
        result.requeue_at(deadline)
        return False
    step = status.progress.step if status.progress is not None else 0
    message = (
        f"All pods run, and no step after {step} came within spec.run.stallDeadlineSeconds: {spec.run.stall_deadline_seconds} s."
    )
    result.emit("Warning", Reason.STALL_DEADLINE_EXCEEDED, message)
    stage.fail(Failure(FailureClass.STALLED, message, POLICY[FailureClass.STALLED].advice), batch_job)
    return True


def _report_progress(observed: Observed, result: PassResult, attempt: int) -> None:
    if observed.progress is not None and observed.progress.attempt == attempt:
        result.set(progress=progress_status(observed.progress, observed.job.status.progress, result.now))


def _succeeded(observed: Observed, result: PassResult, stage: RoleStage, current: JobState) -> None:
    report = current.report
    last = progress_of_facts(report.facts, stage.attempt) if report is not None else None
    if last is not None:
        result.set(progress=progress_status(last, observed.job.status.progress, result.now))
    stage.close(AttemptOutcome.SUCCEEDED)
    result.condition(ConditionType.TRAINED, True, Reason.COMPLETED, report.message if report is not None else "")
    result.emit("Normal", Reason.COMPLETED, f"Attempt {stage.attempt} finished the training.")

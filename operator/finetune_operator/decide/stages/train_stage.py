"""Training: one Indexed Job per attempt of the gang, and the restart from the last checkpoint after a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from finetune_job.api.status import ProgressStatus
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.progress import Progress
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.placement import PREFLIGHT_GATE
from finetune_operator.children.train_job import gang_service, train_job
from finetune_operator.decide.failures.classify import Failure
from finetune_operator.decide.failures.device_faults import with_device_fault
from finetune_operator.decide.failures.job_state import JobState, State
from finetune_operator.decide.failures.restart_policy import POLICY
from finetune_operator.decide.gang.attempts import GangSize
from finetune_operator.decide.gang.elastic import (
    Elasticity,
    elasticity,
    gang_nodes,
    grows,
    nodes_after_failure,
    nodes_that_came,
    nodes_to_queue_for,
    queued_since,
)
from finetune_operator.decide.gang.rank_restarts import restarts_allowed, with_rank_restarts
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.seen.children_seen import BatchJobView
from finetune_operator.decide.seen.frozen_plan import PlanLost, frozen_plan
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.stage import attempt_of, current_role
from finetune_operator.decide.seen.times import stall_deadline, timestamp
from finetune_operator.decide.stages.blocked import wait_for_refused_write
from finetune_operator.decide.stages.role_stage import RoleStage

_FIX_OF_UNGATING = "The operator has to remove the gate from the Job: install the chart with kueue.patchJobs=true."


def train_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """Handle one pass while the job is prepared but not trained. Returns whether the next stage may begin."""
    observed = with_rank_restarts(observed, result, attempt_of(observed.job.status, Role.TRAIN))
    limits, ranks = elasticity(run.plan), run.plan.parallelism
    nodes = gang_nodes(run.plan, observed.job.status.gang_nodes)
    size = None if limits is None else GangSize(nodes, nodes * ranks.processes_per_node)
    stage = RoleStage(observed, result, Role.TRAIN, nodes, ranks.nodes, size)
    current = with_device_fault(observed, stage.job_state())
    progress = observed.progress
    if current.state is State.SUCCEEDED and current.report is not None:
        # If the report's facts contain no progress, keep the last known progress.
        progress = progress_of_facts(current.report.facts, stage.attempt) or progress
    if progress is not None and progress.attempt == stage.attempt:
        result.set(progress=progress_status(progress, observed.job.status.progress, result.now))
    if current.state is State.ABSENT:

        def build() -> list[Mapping[str, Any]]:
            # Create the Service before the Job: without the Service, the ranks' hostnames do not resolve.
            job = train_job(run, stage.attempt, stage.nodes, restarts_allowed(observed, run))
            return [job] if observed.service_exists else [gang_service(run.owner), job]

        stage.create(build)
    elif current.state is State.SUCCEEDED:
        stage.close(AttemptOutcome.SUCCEEDED)
        message = current.report.message if current.report is not None else ""
        result.condition(ConditionType.TRAINED, True, Reason.COMPLETED, message)
        result.emit("Normal", Reason.COMPLETED, f"Attempt {stage.attempt} finished the training.")
        return True
    elif current.failure is not None:
        after = None if limits is None else nodes_after_failure(limits, nodes, current.pods)
        stage.fail(current.failure, current.batch_job, after)
    elif current.batch_job is not None:
        if not observed.service_exists:
            result.create(gang_service(run.owner))
        batch_job = current.batch_job
        if not any(intervene(stage, limits, current, batch_job) for intervene in INTERVENTIONS):
            stage.wait(current, batch_job)
    return False


def _lift_gate(stage: RoleStage, _limits: Elasticity | None, current: JobState, batch_job: BatchJobView) -> bool:
    """Remove our gate, so that the queue can admit a Job that waited there during preflight. Returns whether it had the gate.

    A gate on a running Job is ignored, because anybody may have added it.
    """
    if current.state is not State.QUEUED or PREFLIGHT_GATE not in batch_job.admission_gates:
        return False
    if not wait_for_refused_write(stage.observed, stage.result, ConditionType.TRAINED, _FIX_OF_UNGATING):
        stage.result.ungate(batch_job, PREFLIGHT_GATE)
    return True


def queue_of_growth(observed: Observed, now: datetime) -> str | None:
    """The LocalQueue of a gang that is due to grow, else None. It grows if no Workload is waiting (`waiting_in_queue`)."""
    status = observed.job.status
    if observed.progress is None or not status.gang_nodes or current_role(status) is not Role.TRAIN:
        return None
    run = frozen_plan(observed)
    limits = None if isinstance(run, PlanLost) else elasticity(run.plan)
    if isinstance(run, PlanLost) or limits is None or not limits.is_queued:
        return None
    is_due = grows(limits, status.gang_nodes, status.attempts, now, progress=observed.progress, before=status.progress)
    return run.placement.pods.train.queue_name if is_due else None


def _resize(stage: RoleStage, limits: Elasticity | None, current: JobState, batch_job: BatchJobView) -> bool:
    """End the attempt in order to continue on the nodes it got, or to ask for fewer or all nodes. Returns whether it ended."""
    if limits is None:
        return False
    now, status = stage.result.now, stage.observed.job.status
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
        placed = nodes_that_came(limits, stage.nodes, current.pods, since, now)
        if placed is not None:
            stage.resize(placed, f"{placed} of {stage.nodes} pods had a node within {waited:.0f} s.", batch_job)
            return True
        if now < since + limits.shrink_after:
            stage.result.requeue_at(since + limits.shrink_after)
    progress = stage.observed.progress
    if progress is not None and progress.attempt != stage.attempt:
        progress = None
    may_grow = current.state is State.RUNNING and (not limits.is_queued or stage.observed.waiting_in_queue == 0)
    if may_grow and grows(limits, stage.nodes, status.attempts, now, progress=progress, before=status.progress):
        stage.resize(limits.most, f"Attempt {stage.attempt} has saved a checkpoint and may grow.", batch_job)
        return True
    return False


def _fail_stalled(stage: RoleStage, _limits: Elasticity | None, current: JobState, batch_job: BatchJobView) -> bool:
    """Fail the attempt if its pods are running but have not completed a step for too long. Returns whether it failed."""
    spec, status, result = stage.observed.job.spec, stage.observed.job.status, stage.result
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
        f"All pods run, but no step followed step {step} for {spec.run.stall_deadline_seconds} s (spec.run.stallDeadlineSeconds)."
    )
    result.emit("Warning", Reason.STALL_DEADLINE_EXCEEDED, message)
    stage.fail(Failure(FailureClass.STALLED, message, POLICY[FailureClass.STALLED].advice), batch_job)
    return True


INTERVENTIONS: tuple[Callable[[RoleStage, Elasticity | None, JobState, BatchJobView], bool], ...] = (
    _lift_gate,
    _resize,
    _fail_stalled,
)
"""Interventions in a gang that has neither failed nor succeeded. They are tried in order until one of them acts."""


def progress_status(progress: Progress, before: ProgressStatus | None, now: datetime) -> ProgressStatus:
    """Convert progress to the form that status has, where fractional numbers are strings with six significant digits."""
    advanced = before is None or before.step != progress.step or not before.advanced_time
    first = before.first_step_time if before is not None else ""
    known = before.checkpoint_step if before is not None else None
    saved = progress.checkpoint_step is not None and (known is None or progress.checkpoint_step > known)
    return ProgressStatus(
        first_step_time=first or (timestamp(now) if progress.step else ""),
        advanced_time=timestamp(now) if advanced or before is None else before.advanced_time,
        step=progress.step,
        total_steps=progress.total_steps,
        loss=_text(progress.loss),
        eval_loss=_text(progress.eval_loss),
        initial_eval_loss=_text(progress.initial_eval_loss),
        tokens_per_second=_text(progress.tokens_per_second),
        calculated_tokens_per_second=_text(progress.calculated_tokens_per_second),
        mfu=_text(progress.mfu),
        goodput=_text(progress.goodput),
        checkpoint_step=progress.checkpoint_step,
        checkpoint_time=timestamp(now) if saved else before.checkpoint_time if before is not None else "",
        summary=f"{progress.step}/{progress.total_steps}",
    )


def progress_of_facts(facts: Mapping[str, str], attempt: int) -> Progress | None:
    """Read the final progress from the facts in the training pod's report; None if they do not contain it."""
    try:
        return Progress.model_validate({**facts, "attempt": attempt})
    except ValidationError:
        return None


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"

"""Training: one Indexed Job per attempt of the gang, and the restart from the last checkpoint after a failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.placement import PREFLIGHT_GATE
from finetune_operator.children.service import gang_service
from finetune_operator.children.train_job import train_job
from finetune_operator.decide.blocked import wait_for_refused_write
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.deadlines import stall_deadline
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import BatchJobView, Observed
from finetune_operator.decide.progress import progress_of_facts, progress_status
from finetune_operator.decide.restart_policy import POLICY
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import Standing, State

_FIX_OF_UNGATING = "The operator has to take the gate off the Job: install the chart with kueue.patchJobs=true."


def train_stage(observed: Observed, draft: Draft, run: FrozenRun) -> bool:
    """One pass while the job is prepared and not trained. Returns whether the next stage may begin."""
    stage = RoleStage(observed, draft, Role.TRAIN, run.plan.parallelism.nodes)
    stands = stage.standing()
    _report_progress(observed, draft, stage.attempt)
    if stands.state is State.ABSENT:
        _create(observed, stage, run)
    elif stands.state is State.SUCCEEDED:
        _succeeded(observed, draft, stage, stands)
        return True
    elif stands.failure is not None:
        stage.fail(stands.failure, stands.batch_job)
    elif stands.batch_job is not None:
        if not observed.service_exists:
            draft.create(gang_service(run.owner))
        # A gate on a Job that runs holds nothing back: anybody may have written it there.
        if stands.state is State.QUEUED and PREFLIGHT_GATE in stands.batch_job.admission_gates:
            if not wait_for_refused_write(observed, draft, ConditionType.TRAINED, _FIX_OF_UNGATING):
                draft.ungate(stands.batch_job, PREFLIGHT_GATE)
        elif not _is_stalled(observed, draft, stage, stands, stands.batch_job):
            stage.wait(stands, stands.batch_job)
    return False


def _create(observed: Observed, stage: RoleStage, run: FrozenRun) -> None:
    """The Service first: without it the ranks would look for names that nobody publishes."""

    def build() -> list[Mapping[str, Any]]:
        job = train_job(run, stage.attempt)
        return [job] if observed.service_exists else [gang_service(run.owner), job]

    stage.create(build)


def _is_stalled(observed: Observed, draft: Draft, stage: RoleStage, stands: Standing, batch_job: BatchJobView) -> bool:
    """Whether the pods run and no new step has come for too long; then the attempt has failed."""
    spec, status = observed.job.spec, observed.job.status
    if stands.state is not State.RUNNING or spec is None or draft.has_value("progress"):
        return False
    deadline = stall_deadline(spec.run, status, stands.pods, stage.nodes)
    if deadline is None:
        return False
    if draft.now < deadline:
        draft.wake_at(deadline)
        return False
    step = status.progress.step if status.progress is not None else 0
    said = f"All pods run, and no step after {step} came within spec.run.stallDeadlineSeconds: {spec.run.stall_deadline_seconds} s."
    draft.emit("Warning", Reason.STALL_DEADLINE_EXCEEDED, said)
    stage.fail(Failure(FailureClass.STALLED, said, POLICY[FailureClass.STALLED].advice), batch_job)
    return True


def _report_progress(observed: Observed, draft: Draft, attempt: int) -> None:
    if observed.progress is not None and observed.progress.attempt == attempt:
        draft.set(progress=progress_status(observed.progress, observed.job.status.progress, draft.now))


def _succeeded(observed: Observed, draft: Draft, stage: RoleStage, stands: Standing) -> None:
    report = stands.report
    last = progress_of_facts(report.facts, stage.attempt) if report is not None else None
    if last is not None:
        draft.set(progress=progress_status(last, observed.job.status.progress, draft.now))
    stage.close("Succeeded")
    draft.condition(ConditionType.TRAINED, True, Reason.COMPLETED, report.message if report is not None else "")
    draft.emit("Normal", Reason.COMPLETED, f"Attempt {stage.attempt} finished the training.")

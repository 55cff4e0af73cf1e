"""Training: one Indexed Job per attempt of the gang, and the restart from the last checkpoint after a failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.service import gang_service
from finetune_operator.children.train_job import train_job
from finetune_operator.decide.attempts import closed, opened, record_of
from finetune_operator.decide.clock import moment_after
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.progress import progress_of_facts, progress_status
from finetune_operator.decide.restart_policy import backoff_seconds
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import Standing, State, standing


def train_stage(observed: Observed, draft: Draft, run: FrozenRun) -> None:
    """One pass while the job is prepared and not trained."""
    status = observed.job.status
    stage = RoleStage(observed, draft, Role.TRAIN)
    record = record_of(status, stage.attempt)
    stands = standing(observed, Role.TRAIN, stage.attempt, run.plan.parallelism.nodes, was_seen=record is not None, now=draft.now)
    _report_progress(observed, draft, stage.attempt)
    if stands.state is State.ABSENT:
        _create(observed, draft, stage, run)
    elif stands.state is State.SUCCEEDED:
        _succeeded(observed, draft, stage, stands)
    elif stands.failure is not None:
        stage.fail(stands.failure, stands.batch_job)
    elif stands.batch_job is not None:
        if record is None:
            draft.set(attempts=opened(status, stage.attempt, stands.batch_job.created))
        if not observed.service_exists:
            draft.create(gang_service(run.owner))
        stage.wait(stands, stands.batch_job)


def _create(observed: Observed, draft: Draft, stage: RoleStage, run: FrozenRun) -> None:
    """The Service first: without it the ranks would look for names that nobody publishes."""
    status = observed.job.status
    if status.attempts and status.attempts[-1].outcome == "Failed" and status.attempts[-1].end_time:
        pause = backoff_seconds(status.restarts)
        until = moment_after(status.attempts[-1].end_time, pause)
        if until is not None and draft.now < until:
            stage.say(Reason.RESTARTING, f"Attempt {stage.attempt} starts after a pause of {pause:.0f} s.")
            draft.condition(ConditionType.READY, False, Reason.RESTARTING)
            draft.wake_at(until)
            return

    def build() -> list[Mapping[str, Any]]:
        job = train_job(run, stage.attempt)
        return [job] if observed.service_exists else [gang_service(run.owner), job]

    stage.create(build)


def _report_progress(observed: Observed, draft: Draft, attempt: int) -> None:
    if observed.progress is not None and observed.progress.attempt == attempt:
        draft.set(progress=progress_status(observed.progress))


def _succeeded(observed: Observed, draft: Draft, stage: RoleStage, stands: Standing) -> None:
    report = stands.report
    last = progress_of_facts(report.facts, stage.attempt) if report is not None else None
    if last is not None:
        draft.set(progress=progress_status(last))
    draft.set(attempts=closed(observed.job.status, stage.attempt, draft.now, "Succeeded"))
    draft.condition(ConditionType.TRAINED, True, Reason.COMPLETED, report.message if report is not None else "")
    draft.condition(ConditionType.READY, False, Reason.PENDING)
    draft.emit("Normal", Reason.COMPLETED, f"Attempt {stage.attempt} finished the training.")

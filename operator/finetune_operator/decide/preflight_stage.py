"""Preflight: the real model and data are looked at on the CPU before an accelerator is taken."""

from __future__ import annotations

from finetune_job.failures import FailureClass, Outcome
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_job.status.conditions import find
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.preflight_job import preflight_job
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.refusal import USER_FAILURES, refuse, wait_for_retry, with_reported
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import Standing, State, standing


def preflight_stage(observed: Observed, draft: Draft, run: FrozenRun) -> None:
    """One pass while the job is not prepared."""
    stage = RoleStage(observed, draft, Role.PREFLIGHT)
    if wait_for_retry(stage):
        return
    before = find(observed.job.status.conditions, ConditionType.PREPARED)
    was_seen = before is not None and before.reason == Reason.RUNNING
    stands = standing(observed, Role.PREFLIGHT, stage.attempt, 1, was_seen=was_seen, now=draft.now)
    if stands.batch_job is None and stands.failure is None:
        stage.create(lambda: [preflight_job(run, stage.attempt)])
    elif stands.state is State.SUCCEEDED:
        _succeeded(observed, draft, stands)
    elif stands.failure is not None and (stands.failure.refused or stands.failure.failure in USER_FAILURES):
        refuse(observed, draft, Role.PREFLIGHT, stands.failure)
    elif stands.failure is not None:
        stage.fail(stands.failure, stands.batch_job)
    elif stands.batch_job is not None:
        stage.wait(stands, stands.batch_job)


def _succeeded(observed: Observed, draft: Draft, stands: Standing) -> None:
    status, report = observed.job.status, stands.report
    if report is not None and report.outcome is Outcome.REFUSED:
        refused = Failure(FailureClass.USER_CONFIG, report.message, report.hint, findings=tuple(report.findings))
        refuse(observed, draft, Role.PREFLIGHT, refused)
        return
    if report is not None and status.plan is not None:
        facts = report.facts
        draft.set(
            plan=status.plan.model_copy(
                update={"model_digest": facts.get("model_digest", ""), "data_hash": facts.get("data_hash", "")}
            ),
            findings=with_reported(observed, report.findings),
        )
    draft.condition(ConditionType.PREPARED, True, Reason.COMPLETED, report.message if report is not None else "")
    draft.condition(ConditionType.READY, False, Reason.PENDING)

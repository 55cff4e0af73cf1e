"""Preflight: the real model and data are looked at on the CPU before an accelerator is taken."""

from __future__ import annotations

from finetune_job.failures import FailureClass, Outcome
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.children.preflight_job import preflight_job
from finetune_operator.decide.classify import Failure
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.refusal import refuse, refused_by_user, wait_for_retry, with_reported
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import Standing


def preflight_stage(observed: Observed, draft: Draft, run: FrozenRun) -> None:
    """One pass while the job is not prepared."""
    stage = RoleStage(observed, draft, Role.PREFLIGHT)
    if not wait_for_retry(stage):
        stage.drive(
            lambda: preflight_job(run, stage.attempt),
            lambda stands: _succeeded(observed, draft, stands),
            lambda failure: refused_by_user(stage, failure),
        )


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

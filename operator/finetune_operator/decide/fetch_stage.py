"""Fetch: model and data from outside the cluster are copied to the workspace, by the one pod that has credentials for it."""

from __future__ import annotations

from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.fetch_job import fetch_job
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.refusal import refused_by_user, wait_for_retry
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import Standing


def fetch_stage(observed: Observed, draft: Draft, run: FrozenRun) -> None:
    """One pass while something is still to be fetched."""
    stage = RoleStage(observed, draft, Role.FETCH)

    def succeeded(stands: Standing) -> None:
        draft.condition(ConditionType.FETCHED, True, Reason.COMPLETED, stands.report.message if stands.report is not None else "")
        draft.condition(ConditionType.READY, False, Reason.PENDING)

    if not wait_for_retry(stage):
        stage.drive(lambda: fetch_job(run, stage.attempt), succeeded, lambda failure: refused_by_user(stage, failure))

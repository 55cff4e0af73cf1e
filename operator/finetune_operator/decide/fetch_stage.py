"""Fetch: model and data from outside the cluster are copied to the workspace, by the one pod that has credentials for it."""

from __future__ import annotations

from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.fetch_job import fetch_job
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import Standing
from finetune_operator.decide.stopped import stop_for_user


def fetch_stage(observed: Observed, draft: Draft, run: FrozenRun) -> bool:
    """One pass while something is still to be fetched. Returns whether the next stage may begin."""
    stage = RoleStage(observed, draft, Role.FETCH)

    def succeeded(stands: Standing) -> bool:
        draft.condition(ConditionType.FETCHED, True, Reason.COMPLETED, stands.report.message if stands.report is not None else "")
        return True

    return stage.drive(
        lambda: fetch_job(run, stage.attempt), succeeded, lambda failure: stop_for_user(observed, draft, stage.role, failure)
    )

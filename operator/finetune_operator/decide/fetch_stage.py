"""Fetch: model and data from outside the cluster are copied to the workspace, by the one pod that has credentials for it."""

from __future__ import annotations

from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.fetch_job import fetch_job
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.job_state import JobState
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.stopped import stop_for_user


def fetch_stage(observed: Observed, result: PassResult, run: FrozenRun) -> bool:
    """One pass while something is still to be fetched. Returns whether the next stage may begin."""
    stage = RoleStage(observed, result, Role.FETCH)

    def succeeded(found: JobState) -> bool:
        result.condition(ConditionType.FETCHED, True, Reason.COMPLETED, found.report.message if found.report is not None else "")
        return True

    return stage.drive(
        lambda: fetch_job(run, stage.attempt), succeeded, lambda failure: stop_for_user(observed, result, stage.role, failure)
    )

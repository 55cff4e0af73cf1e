"""Fetch: model and data from outside the cluster are copied to the workspace, by the one pod that has credentials for it."""

from __future__ import annotations

from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_job.status.conditions import find
from finetune_operator.children.fetch_job import fetch_job
from finetune_operator.children.frozen_run import FrozenRun
from finetune_operator.decide.draft import Draft
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.refusal import USER_FAILURES, refuse, wait_for_retry
from finetune_operator.decide.role_stage import RoleStage
from finetune_operator.decide.standing import State, standing


def fetch_stage(observed: Observed, draft: Draft, run: FrozenRun) -> None:
    """One pass while something is still to be fetched."""
    stage = RoleStage(observed, draft, Role.FETCH)
    if wait_for_retry(stage):
        return
    before = find(observed.job.status.conditions, ConditionType.FETCHED)
    was_seen = before is not None and before.reason == Reason.RUNNING
    stands = standing(observed, Role.FETCH, stage.attempt, 1, was_seen=was_seen, now=draft.now)
    if stands.batch_job is None and stands.failure is None:
        stage.create(lambda: [fetch_job(run, stage.attempt)])
    elif stands.state is State.SUCCEEDED:
        draft.condition(ConditionType.FETCHED, True, Reason.COMPLETED, stands.report.message if stands.report is not None else "")
        draft.condition(ConditionType.READY, False, Reason.PENDING)
    elif stands.failure is not None and stands.failure.failure in USER_FAILURES:
        refuse(observed, draft, Role.FETCH, stands.failure)
    elif stands.failure is not None:
        stage.fail(stands.failure, stands.batch_job)
    elif stands.batch_job is not None:
        stage.wait(stands, stands.batch_job)

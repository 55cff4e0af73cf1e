"""The restart counters of the roles: each has its own, and only training has checkpoints that end a row of restarts."""

from __future__ import annotations

import pytest

from finetune_job.api.status import FineTuneJobStatus, ProgressStatus, Restarts, RoleRestarts
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_operator.decide.attempts import newest_checkpoint, restarts_of
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, a_job, observing
from tests.unit.finetune_operator.decide.reading import written

TRAINED = ProgressStatus(step=10, total_steps=10, checkpoint_step=10)


@pytest.mark.parametrize("role", Role)
def test_only_training_has_checkpoints(role: Role) -> None:
    assert newest_checkpoint(FineTuneJobStatus(progress=TRAINED), role) == (10 if role is Role.TRAIN else None)
    assert newest_checkpoint(FineTuneJobStatus(), role) is None


def test_the_trainings_checkpoints_do_not_let_a_merge_begin_a_new_row() -> None:
    row = Restarts(uncounted=4, in_a_row=4, in_a_row_since="2026-01-01T11:00:00Z")
    seen = observing(a_job()).trained().with_status(progress=TRAINED, role_restarts=RoleRestarts(merge=row))
    status = written(reconcile(seen.batch_job_failed().failed_pod(0, FailureClass.PREEMPTED).build(), T0))
    merge = restarts_of(status, Role.MERGE)
    assert (merge.uncounted, merge.in_a_row, merge.in_a_row_since) == (5, 5, "2026-01-01T11:00:00Z")
    assert merge.at_checkpoint is None
    assert restarts_of(status, Role.TRAIN) == Restarts()


@pytest.mark.parametrize(
    ("failure", "counted"),
    [(FailureClass.INTERNAL, True), (FailureClass.COLLECTIVE, True), (FailureClass.PREEMPTED, False)],
)
def test_an_attempt_says_whether_its_end_counted(failure: FailureClass, counted: bool) -> None:
    status = written(reconcile(observing(a_job()).training().failed_pod(0, failure).batch_job_failed().build(), T0))
    assert [(attempt.number, attempt.outcome, attempt.counted) for attempt in status.attempts] == [(0, "Failed", counted)]
    assert (status.restarts.counted, status.restarts.uncounted) == (int(counted), int(not counted))

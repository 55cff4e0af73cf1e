"""The restart counters of the roles: each has its own, and only training has checkpoints that end a row of restarts."""

import pytest

from finetune_job.api.status import FineTuneJobStatus, ProgressStatus, Restarts, RoleRestarts
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_operator.decide.gang.attempts import newest_checkpoint, restarts_of
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

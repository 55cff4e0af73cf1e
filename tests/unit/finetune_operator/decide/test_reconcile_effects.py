"""What is created and deleted, and when somebody looks again: written by hand."""

from finetune_job.api.status import Attempt, FineTuneJobStatus
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.gang.attempts import closed
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, a_job, after, envelope, observing
from tests.unit.finetune_operator.decide.reading import created, written


def test_a_workspace_claim_that_exists_is_not_created_again() -> None:
    job = a_job().spec("workspace", {"volumeClaimTemplate": {"storage": "1Gi"}})
    there = created(reconcile(observing(job).build(), T0))
    assert "PersistentVolumeClaim/tune-workspace" not in there
    missing = observing(job).but(missing_claims=frozenset({"tune-workspace"}))
    assert created(reconcile(missing.build(), T0))[0] == "PersistentVolumeClaim/tune-workspace"


def test_only_rank_zero_reports_for_the_gang() -> None:
    seen = observing(a_job().nodes(2)).prepared().batch_job("Complete")
    for rank, said in ((0, ""), (1, envelope(message="of rank 1"))):
        seen = seen.pod(rank, exit_code=0, termination_message=said)
    early = reconcile(seen.build(), T0)
    trained = [one for one in (early.status.conditions if early.status else []) if one.type is ConditionType.TRAINED]
    assert all(one.status != "True" for one in trained), "the report of rank 0 is still awaited"
    late = written(reconcile(seen.build(), after(60)))
    (done,) = [one for one in late.conditions if one.type is ConditionType.TRAINED]
    assert (done.status, done.reason, done.message) == ("True", Reason.COMPLETED, "")


def test_the_interim_condition_of_a_success_is_enough() -> None:
    """`Complete` waits until every pod has ended; the next stage does not."""
    seen = observing(a_job()).prepared().batch_job("SuccessCriteriaMet")
    seen = seen.pod(0, exit_code=0, termination_message=envelope(message="trained"))
    (done,) = [one for one in written(reconcile(seen.build(), T0)).conditions if one.type is ConditionType.TRAINED]
    assert (done.status, done.message) == ("True", "trained")


def test_the_end_of_an_attempt_leaves_the_records_of_other_roles_alone() -> None:
    fetched = Attempt(role=Role.FETCH, number=0, start_time="2026-01-01T11:00:00Z", outcome="Succeeded")
    status = FineTuneJobStatus(attempts=[fetched, Attempt(role=Role.TRAIN, number=0)])
    after_end = closed(status, Role.TRAIN, 0, "Failed", T0)
    assert [(one.role, one.number, one.outcome) for one in after_end] == [(Role.FETCH, 0, "Succeeded"), (Role.TRAIN, 0, "Failed")]


def test_a_pod_that_the_job_controller_deletes_is_no_sign_of_a_failing_job() -> None:
    """Without a condition of the Job: a deletion may be the start of a suspension, whose SIGTERM ends the ranks with a code."""
    seen = observing(a_job()).training().pod(0, exit_code=143, deletion_requested=after(-1))
    actions = reconcile(seen.build(), T0)
    assert actions.status is None or actions.status.attempt == 0
    assert actions.deletes == ()

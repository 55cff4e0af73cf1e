"""Preflight."""

from dataclasses import replace

import pytest

from finetune_job.api.status import PlanChoice
from finetune_job.failures import FailureClass, Outcome
from finetune_job.finding import Finding
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.observed import ProfileView
from finetune_operator.decide.stages.preparation_stages import REHEARSED
from finetune_trainer.inspection.report import Verdict
from tests.support.builders import T0, a_job, a_profile, envelope, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

FINDING = Finding(
    rule="preflight/target-modules",
    severity="error",
    field="spec.method.lora.targetModules",
    value="wq",
    message="No such module.",
    fix="Use q_proj.",
)


def test_success_records_the_digests_and_hands_over_to_training() -> None:
    actions = reconcile(observing(a_job()).started().succeeded(model_digest="m" * 64, data_hash="d" * 64).build(), T0)
    assert condition(actions, ConditionType.PREPARED) == ("True", Reason.COMPLETED)
    plan = written(actions).plan
    assert (plan.model_digest, plan.data_hash) == ("m" * 64, "d" * 64)


NOT_DONE = Finding(
    rule="rehearsal-not-done",
    severity="warning",
    field="spec.preflight.rehearsal",
    value="Run",
    message="the job could not be tried to the end.",
    fix="",
)


@pytest.mark.parametrize(
    ("facts", "findings", "shown", "said"),
    [
        ({"rehearsal": "Passed", "rehearsal_seconds": "21.5"}, [], ("True", "Completed"), "Passed in 21.5 s."),
        (
            {"rehearsal": "Passed", "rehearsal_kept_since": "2026-01-02T03:04:05+00:00"},
            [],
            ("True", "Completed"),
            "Passed on this claim before, at 2026-01-02T03:04:05+00:00.",
        ),
        ({"rehearsal": "NotDone"}, [NOT_DONE], ("False", "NotRehearsed"), "the job could not be tried to the end."),
        ({"rehearsal": "Skipped"}, [], ("False", "Skipped"), "spec.preflight.rehearsal is Skip."),
        ({"rehearsal": "else"}, [], ("Unknown", "NotObserved"), "Preflight did not report it."),
        ({}, [], ("Unknown", "NotObserved"), "Preflight did not report it."),
    ],
)
def test_how_the_rehearsal_went_is_a_condition(
    facts: dict[str, str], findings: list[Finding], shown: tuple[str, str], said: str
) -> None:
    report = envelope(outcome=Outcome.SUCCEEDED, role=Role.PREFLIGHT, findings=findings, facts=facts)
    seen = observing(a_job()).started().pod(0, exit_code=0, termination_message=report).batch_job("Complete")
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.REHEARSED) == shown
    assert message(actions, ConditionType.REHEARSED) == said
    assert condition(actions, ConditionType.PREPARED) == ("True", Reason.COMPLETED)


def test_every_verdict_of_a_rehearsal_has_a_condition() -> None:
    assert set(REHEARSED) == {verdict.value for verdict in Verdict}


def test_a_rehearsal_that_failed_is_a_condition() -> None:
    failed = FINDING.model_copy(update={"rule": "rehearsal-failed", "message": "no."})
    report = envelope(
        FailureClass.USER_CONFIG, outcome=Outcome.REFUSED, role=Role.PREFLIGHT, findings=[failed], facts={"rehearsal": "Failed"}
    )
    seen = observing(a_job()).started().pod(0, exit_code=40, termination_message=report).batch_job_failed()
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.REHEARSED) == ("False", "RehearsalFailed")
    assert message(actions, ConditionType.REHEARSED) == "no."
    assert condition(actions, ConditionType.PREPARED) == ("False", Reason.PREFLIGHT_REFUSED)


@pytest.mark.parametrize(("rehearsal", "is_accepted"), [("Passed", True), ("NotDone", False), ("Skipped", False), ("", False)])
def test_a_profile_may_require_a_rehearsal(rehearsal: str, is_accepted: bool) -> None:
    """A trainer image of an earlier release does not know that it is required."""
    seen = observing(a_job().with_profile(requireRehearsal=True)).started().succeeded(rehearsal=rehearsal)
    actions = reconcile(seen.build(), T0)
    if is_accepted:
        assert condition(actions, ConditionType.PREPARED) == ("True", Reason.COMPLETED)
        return
    assert condition(actions, ConditionType.PREPARED) == ("False", Reason.PREFLIGHT_REFUSED)
    (finding,) = (one for one in written(actions).findings if one.rule == "rehearsal-required")
    assert (finding.severity, finding.field) == ("error", "spec.preflight.rehearsal")
    assert "requireRehearsal of profile default" in finding.message
    assert "spec.run.retry" in finding.fix
    assert created(actions) == []


RESHARD = "spec.parallelism.fsdp.reshardAfterForward"


@pytest.mark.parametrize(
    ("fact", "shown"),
    [
        (f'{{"field": "{RESHARD}", "value": false, "reason": "it fits"}}', ("false", "it fits")),
        (f'{{"field": "{RESHARD}", "value": true, "reason": "scarce"}}', ("true", "scarce")),
        ('{"field": "spec.training.seed", "value": 3, "reason": "mine"}', None),
        ('{"field": 3}', None),
        ("", None),
    ],
)
def test_choices_of_preflight_fill_what_the_plan_left_open(fact: str, shown: tuple[str, str] | None) -> None:
    seen = observing(a_job()).started()
    choices = [PlanChoice(field="spec.training.seed", value="42"), PlanChoice(field=RESHARD, value="null", reason="open")]
    status = seen.status.model_copy(update={"plan": seen.status.plan.model_copy(update={"choices": choices})})
    plan = written(reconcile(replace(seen, status=status).succeeded(resharding=fact).build(), T0)).plan
    found = [(one.field, one.value, one.reason) for one in plan.choices]
    assert found == [("spec.training.seed", "42", ""), (RESHARD, *(shown or ("null", "open")))]


@pytest.mark.parametrize("fact", ['[{"field": "spec.training.microBatchSize", "value": 2, "reason": "fits"}]', "[3]", "{", ""])
def test_the_batches_that_preflight_chose_are_shown(fact: str) -> None:
    field = "spec.training.microBatchSize"
    seen = observing(a_job()).started()
    choices = [PlanChoice(field=field, value="null", reason="open")]
    status = seen.status.model_copy(update={"plan": seen.status.plan.model_copy(update={"choices": choices})})
    plan = written(reconcile(replace(seen, status=status).succeeded(batches=fact, resharding="x").build(), T0)).plan
    expected = ("2", "fits") if "fits" in fact else ("null", "open")
    assert [(one.field, one.value, one.reason) for one in plan.choices] == [(field, *expected)]


def test_the_report_of_a_pod_whose_watch_lags_is_awaited() -> None:
    seen = observing(a_job()).started().batch_job("Complete").running()
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.PREPARED)[0] == "Unknown"
    assert 0 < actions.requeue_after_seconds <= 10


def test_a_refusal_stalls_the_job_and_says_what_to_change() -> None:
    actions = reconcile(observing(a_job()).started().refused(FINDING).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.PREFLIGHT_REFUSED)
    assert condition(actions, ConditionType.PREPARED) == ("False", Reason.PREFLIGHT_REFUSED)
    assert "Use q_proj." in message(actions, ConditionType.STALLED)
    assert [finding.rule for finding in written(actions).findings] == ["preflight/target-modules"]
    assert [finding.source for finding in written(actions).findings] == ["preflight"]
    assert [finding.rule for finding in actions.news] == ["preflight/target-modules"]
    assert "preflight/target-modules: " in actions.events[-1].message
    assert (actions.creates, actions.deletes) == ((), ())
    (attempt,) = written(actions).attempts
    assert (attempt.role, attempt.outcome, attempt.failure, attempt.counted) == (
        "preflight",
        "Failed",
        FailureClass.USER_CONFIG,
        False,
    )
    assert attempt.end_time


def test_a_refusal_counts_although_the_container_ended_well() -> None:
    """The report says what became of the job; the exit code is another's word for it."""
    report = envelope(
        FailureClass.USER_CONFIG, outcome=Outcome.REFUSED, role=Role.PREFLIGHT, findings=[FINDING], message="refused"
    )
    seen = observing(a_job()).started().pod(0, exit_code=0, termination_message=report).batch_job("Complete")
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.PREPARED) == ("False", Reason.PREFLIGHT_REFUSED)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.PREFLIGHT_REFUSED)
    assert [finding.rule for finding in written(actions).findings] == ["preflight/target-modules"]
    assert created(actions) == []


def test_sentences_of_a_refusal_do_not_run_together() -> None:
    finding = FINDING.model_copy(update={"fix": 'write {"prompt": "...", "completion": "..."}'})
    said = message(reconcile(observing(a_job()).started().refused(finding).build(), T0), ConditionType.STALLED)
    assert '"completion": "..."}. Fix the cause' in said


@pytest.mark.parametrize("failure", [FailureClass.USER_CONFIG, FailureClass.USER_DATA, FailureClass.USER_MODEL])
def test_a_failure_of_the_users_making_counts_as_a_refusal(failure: FailureClass) -> None:
    actions = reconcile(observing(a_job()).started().failed_pod(0, failure, message="broken").batch_job_failed().build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.PREFLIGHT_REFUSED)
    assert written(actions).findings[0].message.endswith("broken")


def test_a_refused_job_rests_until_retry_is_raised() -> None:
    seen = observing(a_job()).started().refused(FINDING)
    refused = written(reconcile(seen.build(), T0))
    again = reconcile(replace(seen, status=refused).build(), T0)
    assert (again.status, again.creates, again.deletes, again.events) == (None, (), (), ())


def test_raising_retry_runs_preflight_again_with_the_same_plan() -> None:
    seen = observing(a_job()).started().refused(FINDING)
    refused = written(reconcile(seen.build(), T0))
    retried = replace(seen, status=refused, job=a_job().run(retry=1))
    actions = reconcile(retried.build(), T0)
    status = written(actions)
    assert (status.preflight_attempt, status.retry_handled) == (1, 1)
    assert status.plan == refused.plan
    assert condition(actions, ConditionType.STALLED) == ("False", Reason.HEALTHY)
    assert status.findings == []
    assert deleted(actions) == ["Job/tune-preflight-0"]
    assert actions.creates == ()
    gone = replace(retried, status=status, batch_jobs=(), pods=()).nothing_left()
    assert created(reconcile(gone.build(), T0)) == ["Job/tune-preflight-1"]


def test_a_retry_asked_for_while_a_claim_is_missing_is_not_forgotten() -> None:
    seen = observing(a_job()).started().refused(FINDING)
    refused = written(reconcile(seen.build(), T0))
    retried = replace(seen, status=refused, job=a_job().run(retry=1), missing_claims=frozenset({"data"}))
    actions = reconcile(retried.build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.CLAIM_NOT_FOUND)
    back = replace(retried, status=written(actions), missing_claims=frozenset())
    assert written(reconcile(back.build(), T0)).preflight_attempt == 1


def test_a_retry_of_a_job_that_is_not_stalled_changes_nothing() -> None:
    actions = reconcile(observing(a_job().run(retry=3)).started().batch_job().running().build(), T0)
    assert (written(actions).retry_handled, written(actions).preflight_attempt) == (3, 0)


def test_a_preflight_job_that_somebody_deletes_is_repeated_under_a_new_number() -> None:
    seen = observing(a_job()).started().condition(ConditionType.PREPARED, None, Reason.RUNNING)
    actions = reconcile(seen.build(), T0)
    assert written(actions).preflight_attempt == 1
    assert actions.creates == ()


def test_out_of_host_memory_waits_for_a_larger_profile_and_takes_its_resources() -> None:
    seen = observing(a_job()).started().pod(0, exit_code=137, reason="OOMKilled").batch_job_failed()
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.PREFLIGHT_STOPPED)
    assert condition(actions, ConditionType.PREPARED) == ("False", Reason.PREFLIGHT_STOPPED)
    assert condition(actions, ConditionType.FINISHED)[0] != "True"
    assert "profile with more memory" in message(actions, ConditionType.STALLED)
    larger = ProfileView("default", a_profile(resources={"preflight": {"memory": "96Gi"}}))
    retried = replace(seen, status=written(actions), job=a_job().run(retry=1), profile=larger)
    again = reconcile(retried.build(), T0)
    assert (written(again).preflight_attempt, deleted(again)) == (1, ["Job/tune-preflight-0"])
    gone = replace(retried, status=written(again), batch_jobs=(), pods=()).nothing_left()
    (job,) = reconcile(gone.build(), T0).creates
    assert job.body["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "96Gi"


def test_the_profile_is_not_looked_at_again_before_the_user_asks() -> None:
    larger = ProfileView("default", a_profile(resources={"preflight": {"memory": "96Gi"}}))
    (job,) = reconcile(observing(a_job()).started().but(profile=larger).build(), T0).creates
    assert job.body["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "8Gi"

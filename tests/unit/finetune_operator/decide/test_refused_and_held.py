"""What keeps a job waiting is said in the words of what makes it wait: API server, queue, namespace limit, user."""

from dataclasses import replace

import pytest

from finetune_job.api.status import ProgressStatus
from finetune_job.failures import FailureClass
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import RefusedWrite
from finetune_operator.decide.seen.observed import PlaceInLine
from tests.support.builders import T0, ObservedBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

QUOTA = 'jobs.batch "tune-preflight-0" is forbidden: exceeded quota: jobs, requested: count/jobs.batch=1, used: 3, limited: 3'
INVALID = 'Job.batch "tune-preflight-0" is invalid: spec.template.spec.tolerations: Invalid value'


def refused(message: str, code: int, retry_in: float = 60.0) -> ObservedBuilder:
    create = RefusedWrite("Job", "tune-preflight-0", code, message, tries=2, retry_at=after(retry_in))
    return observing(a_job()).started().but(refused_write=create)


def test_a_quota_on_jobs_is_said_in_condition_and_event_and_waited_for() -> None:
    actions = reconcile(refused(QUOTA, 403).build(), T0)
    assert condition(actions, ConditionType.PREPARED) == ("Unknown", Reason.CREATE_REFUSED)
    assert condition(actions, ConditionType.STALLED)[0] == "False"
    assert QUOTA in message(actions, ConditionType.READY)
    assert [(one.type, one.reason) for one in actions.events] == [("Warning", Reason.CREATE_REFUSED)]
    assert (created(actions), actions.requeue_after_seconds) == ([], 60.0)
    again = reconcile(replace(refused(QUOTA, 403), status=written(actions)).build(), after(1))
    assert (again.status, again.events) == (None, ())


@pytest.mark.parametrize(("words", "code"), [(INVALID, 422), ('admission webhook "policy" denied the request: no', 403)])
def test_a_refusal_that_time_does_not_cure_needs_a_human(words: str, code: int) -> None:
    actions = reconcile(refused(words, code).build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.CREATE_REFUSED)
    assert words in message(actions, ConditionType.STALLED)


def test_a_refused_create_is_tried_again_when_its_time_has_come_without_flapping() -> None:
    told = written(reconcile(refused(QUOTA, 403).build(), T0))
    due = replace(refused(QUOTA, 403, retry_in=0.0), status=told)
    actions = reconcile(due.nothing_left().build(), T0)
    assert (created(actions), actions.status) == (["Job/tune-preflight-0"], None)


def test_a_plan_that_cannot_be_stored_is_said_too() -> None:
    create = RefusedWrite("ConfigMap", "tune-plan", 403, "exceeded quota: maps", 1, after(60))
    actions = reconcile(observing(a_job()).frozen().but(refused_write=create).build(), T0)
    assert condition(actions, ConditionType.READY) == ("False", Reason.CREATE_REFUSED)
    assert created(actions) == []


@pytest.mark.parametrize(
    ("event", "is_quota"),
    [
        ('FailedCreate: Error creating: pods "tune" is forbidden: exceeded quota: pods', True),
        ('FailedCreate: Error creating: pods "tune" is forbidden: violates PodSecurity "restricted:latest"', False),
    ],
)
def test_pods_that_the_api_server_refuses_are_said_from_the_events_of_the_job(event: str, is_quota: bool) -> None:
    seen = observing(a_job().run(startupDeadlineSeconds=1_000)).started().batch_job(events=(event,))
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.PREPARED) == ("Unknown", Reason.CREATE_REFUSED)
    assert event in message(actions, ConditionType.READY)
    assert [one.reason for one in actions.events] == [Reason.CREATE_REFUSED]
    late = reconcile(seen.build(), after(100_000))
    assert (condition(late, ConditionType.SUCCEEDED)[0] == "Unknown") is is_quota, "a quota is waited for, a policy is not"


@pytest.mark.parametrize(
    "words",
    [
        {"waiting_message": 'Back-off pulling image "registry.example/absent:1": ErrImagePull: not found'},
        {"events": ('Failed: Failed to pull image "registry.example/absent:1": not found', "Failed: Error: ImagePullBackOff")},
    ],
)
def test_an_image_that_cannot_be_pulled_is_named_with_the_cause(words: dict[str, object]) -> None:
    seen = observing(a_job()).started().batch_job().pod(0, waiting_reason="ImagePullBackOff", **words)
    said = message(reconcile(seen.build(), T0), ConditionType.PREPARED)
    assert '"registry.example/absent:1"' in said
    assert "not found" in said


def test_pods_that_start_within_seconds_are_not_worth_a_write() -> None:
    seen = observing(a_job()).started().condition(ConditionType.PREPARED, None, Reason.WAITING_FOR_PODS)
    seen = seen.condition(ConditionType.READY, False, Reason.WAITING_FOR_PODS).condition(
        ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED
    )
    young = reconcile(seen.batch_job(created=after(-2), start_time=after(-2)).pod(0).build(), T0)
    assert (young.status, young.requeue_after_seconds) == (None, 8.0)
    older = seen.batch_job(created=after(-10), start_time=after(-10))
    assert message(reconcile(older.pod(0).build(), T0), ConditionType.PREPARED) == "0 of 1 pods have started."
    pulling = reconcile(older.pod(0, waiting_reason="ContainerCreating").build(), T0)
    assert message(pulling, ConditionType.PREPARED) == "0 of 1 pods have started. tune-preflight-0-0: ContainerCreating"


def test_a_queue_speaks_for_itself() -> None:
    seen = observing(a_job()).prepared().but(service_exists=True)
    held = seen.batch_job(suspended=True, queue="QuotaReserved=False, ExceedsMaxQuota: insufficient quota for nvidia.com/gpu")
    actions = reconcile(held.build(), after(10**7))
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", Reason.QUEUED)
    assert "ExceedsMaxQuota" in message(actions, ConditionType.READY)
    assert actions.events == (), "waiting for the first time is no preemption"


def test_a_job_that_its_queue_lets_go_after_a_month_has_not_failed_to_start() -> None:
    """Between the queue's word and the Job controller's there are no pods yet, and no start that the deadline could count
    from."""
    seen = observing(a_job()).prepared().but(service_exists=True).condition(ConditionType.TRAINED, None, Reason.QUEUED)
    actions = reconcile(seen.batch_job(created=after(-30 * 86_400), start_time=None).build(), T0)
    assert condition(actions, ConditionType.TRAINED) == ("Unknown", Reason.WAITING_FOR_PODS)
    assert condition(actions, ConditionType.FINISHED)[0] != "True"
    assert (created(actions), actions.deletes) == ([], ())


@pytest.mark.parametrize(("ahead", "starts"), [(1, True), (2, False), (7, False)])
def test_a_job_waits_in_the_line_of_its_namespace_and_sees_its_place(ahead: int, starts: bool) -> None:
    actions = reconcile(observing(a_job()).but(line=PlaceInLine(limit=2, ahead=ahead)).build(), T0)
    assert bool(created(actions)) is starts
    assert bool(written(actions).start_time) is starts
    if not starts:
        assert condition(actions, ConditionType.READY) == ("False", Reason.WAITING_IN_LINE)
        assert f"Place in the line: {ahead - 1}." in message(actions, ConditionType.READY)
        assert actions.requeue_after_seconds is not None


def test_far_behind_in_the_line_a_moving_place_is_not_written_each_time() -> None:
    first = reconcile(observing(a_job()).but(line=PlaceInLine(limit=2, ahead=2345)).build(), T0)
    assert "Place in the line: about 2000." in message(first, ConditionType.READY)
    moved = reconcile(observing(a_job()).but(status=written(first), line=PlaceInLine(limit=2, ahead=2100)).build(), after(300))
    assert moved.status is None
    assert moved.requeue_after_seconds == 300
    near = reconcile(observing(a_job()).but(line=PlaceInLine(limit=2, ahead=11)).build(), T0)
    assert "Place in the line: 10." in message(near, ConditionType.READY)
    assert near.requeue_after_seconds == 30


def test_a_started_job_is_not_sent_back_to_the_line() -> None:
    seen = observing(a_job()).frozen().but(line=PlaceInLine(limit=1, ahead=5))
    assert created(reconcile(seen.build(), T0)) == ["NetworkPolicy/tune-run", "ConfigMap/tune-plan", "Job/tune-preflight-0"]


def test_what_an_earlier_job_of_the_name_leaves_is_waited_for_and_no_conflict() -> None:
    actions = reconcile(observing(a_job()).frozen().but(vanishing=("Job/tune-preflight-0",)).build(), T0)
    assert created(actions) == []
    assert condition(actions, ConditionType.READY) == ("False", Reason.PENDING)
    assert condition(actions, ConditionType.STALLED)[0] == "False"
    assert actions.requeue_after_seconds is not None


def test_nothing_is_frozen_while_the_workspace_claim_of_an_earlier_job_is_there() -> None:
    job = a_job().spec("workspace", {"volumeClaimTemplate": {"storage": "10Gi"}})
    going = observing(job).but(vanishing=("PersistentVolumeClaim/tune-workspace",), missing_claims=frozenset({"tune-workspace"}))
    stalled = going.condition(ConditionType.STALLED, True, Reason.CONFLICT, "PersistentVolumeClaim/tune-workspace exists.")
    actions = reconcile(stalled.build(), T0)
    assert (written(actions).start_time, created(actions)) == ("", [])
    assert condition(actions, ConditionType.READY) == ("False", Reason.PENDING)
    assert condition(actions, ConditionType.STALLED) == ("False", Reason.HEALTHY)


def test_a_training_without_a_new_step_is_restarted_and_counted() -> None:
    job = a_job().run(stallDeadlineSeconds=600)
    progress = ProgressStatus(step=7, total_steps=10, advanced_time="2026-01-01T12:00:00Z")
    seen = observing(job).training().with_status(progress=progress)
    assert reconcile(seen.build(), after(599)).requeue_after_seconds == 1
    actions = reconcile(seen.build(), after(600))
    status = written(actions)
    assert (status.attempt, status.restarts.counted) == (1, 1)
    assert status.attempts[0].failure is FailureClass.STALLED
    assert "no step followed step 7" in status.attempts[0].message
    assert deleted(actions) == ["Job/tune-train-0"]
    assert Reason.STALL_DEADLINE_EXCEEDED in [one.reason for one in actions.events]


def test_time_under_suspension_does_not_count_against_the_active_deadline() -> None:
    job = a_job().run(activeDeadlineSeconds=700)  # the builder's job started 600 s ago
    seen = observing(job).training().condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER)
    held = replace(seen, job=a_job().run(activeDeadlineSeconds=700, suspend=True))
    assert condition(reconcile(held.build(), after(10**6)), ConditionType.SUCCEEDED)[0] == "Unknown"
    resumed = reconcile(seen.build(), after(50))
    assert written(resumed).suspended_seconds == 650, "since ten minutes before T0"
    later = replace(seen, status=written(resumed))
    in_time = reconcile(later.build(), after(749))
    assert (in_time.status, in_time.requeue_after_seconds) == (None, 1)
    assert condition(reconcile(later.build(), after(750)), ConditionType.SUCCEEDED) == ("False", Reason.ACTIVE_DEADLINE_EXCEEDED)

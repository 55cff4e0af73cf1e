"""Training takes its place in the queue while preflight runs, and is let in once preflight has passed."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.actions import Actions, Ungate
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import RefusedWrite
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.seen.times import timestamp
from tests.support.builders import T0, JobBuilder, ObservedBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

GATES = "kueue.x-k8s.io/admission-gated-by"
OURS = "finetune.dev/preflight"
FORBIDDEN = 'jobs.batch "tune-train-0" is forbidden: User "operator" cannot patch resource "jobs" in API group "batch"'


def queued(**kueue: Any) -> JobBuilder:
    return a_job().with_profile(pods={"train": {"queueName": "gpus"}}, kueue={"queueDuringPreflight": True, **kueue})


def preflight(job: JobBuilder | None = None) -> ObservedBuilder:
    """Its pod runs."""
    return observing(job or queued()).started().condition(ConditionType.PREPARED, None, Reason.RUNNING).batch_job().running()


def with_gate(seen: ObservedBuilder, *gates: str) -> ObservedBuilder:
    """The training Job waits."""
    role, pods = seen.role, seen.pods
    waiting = replace(seen, role=Role.TRAIN).batch_job(suspended=True, start_time=None, admission_gates=gates or (OURS,))
    return replace(waiting, role=role, pods=pods)


def prepared(*gates: str) -> ObservedBuilder:
    return with_gate(observing(queued()).prepared().but(service_exists=True), *gates)


def passed(observed: Observed) -> Actions:
    return reconcile(observed, T0)


def test_training_waits_behind_the_gate_from_the_moment_that_preflight_has_a_job() -> None:
    assert created(passed(observing(queued()).started().build())) == ["Job/tune-preflight-0"]
    actions = passed(preflight().build())
    assert created(actions) == ["Job/tune-train-0"]
    body = actions.creates[0].body
    assert body["metadata"]["annotations"][GATES] == "finetune.dev/preflight"
    assert body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert body["spec"]["suspend"] is True
    assert actions.status is None, "the attempt has not begun"


@pytest.mark.parametrize(
    "job",
    [
        a_job(),
        a_job().with_profile(pods={"train": {"queueName": "gpus"}}),
        a_job().with_profile(kueue={"queueDuringPreflight": True}),
        queued(queueDuringPreflight=False),
    ],
    ids=["nothing set", "a queue alone", "no queue", "switched off"],
)
def test_nobody_else_has_a_training_job_before_preflight_has_passed(job: JobBuilder) -> None:
    assert created(passed(preflight(job).build())) == []
    body = next(one.body for one in passed(observing(job).prepared().build()).creates if one.name == "tune-train-0")
    assert GATES not in body["metadata"]["annotations"]
    assert "suspend" not in body["spec"]


def test_a_place_that_is_taken_is_not_taken_again_and_preflight_continues() -> None:
    actions = passed(with_gate(preflight()).build())
    assert (created(actions), deleted(actions), actions.ungates) == ([], [], ())


def test_a_preflight_that_is_tried_again_keeps_the_place() -> None:
    evicted = observing(queued()).started().pod(0, exit_code=143, disruption="EvictionByEvictionAPI")
    failed = with_gate(evicted.batch_job_failed("PodFailurePolicy"))
    actions = passed(failed.build())
    assert deleted(actions) == ["Job/tune-preflight-0"]
    assert written(actions).preflight_attempt == 1


@pytest.mark.parametrize("failure", [FailureClass.USER_DATA, FailureClass.HOST_OUT_OF_MEMORY])
def test_a_preflight_that_needs_a_human_leaves_the_queue(failure: FailureClass) -> None:
    stopped = with_gate(observing(queued()).started().failed_pod(0, failure).batch_job_failed())
    actions = passed(stopped.build())
    assert condition(actions, ConditionType.STALLED)[0] == "True"
    assert deleted(actions) == ["Job/tune-train-0"]
    assert created(passed(replace(stopped, status=written(actions), batch_jobs=stopped.batch_jobs[:1]).build())) == []


def test_a_job_that_ends_leaves_the_queue() -> None:
    cancelled = with_gate(preflight(queued().run(cancel=True))).nothing_left()
    assert sorted(deleted(passed(cancelled.build()))) == ["Job/tune-preflight-0", "Job/tune-train-0"]


def test_without_the_right_to_the_place_preflight_continues_alone() -> None:
    refused = RefusedWrite("Job", "tune-train-0", 403, "exceeded quota: jobs", 1, after(60))
    assert created(passed(preflight().but(refused_write=refused).build())) == []
    done = observing(queued()).started().but(refused_write=refused).succeeded(model_digest="m" * 64, data_hash="d" * 64)
    assert condition(passed(done.build()), ConditionType.PREPARED) == ("True", Reason.COMPLETED)


def test_the_gate_is_taken_off_once_preflight_has_passed() -> None:
    actions = passed(prepared().build())
    assert actions.ungates == (Ungate("tune-train-0", "uid-train-0", ()),)
    assert (created(actions), deleted(actions)) == ([], [])


def test_gates_of_others_stay() -> None:
    assert passed(prepared("example.com/budget", OURS, "example.com/night").build()).ungates == (
        Ungate("tune-train-0", "uid-train-0", ("example.com/budget", "example.com/night")),
    )
    waits = passed(prepared("example.com/budget").build())
    assert waits.ungates == ()
    assert condition(waits, ConditionType.READY) == ("False", Reason.QUEUED)


def test_a_right_that_is_missing_is_said_and_tried_again_in_its_time() -> None:
    refused = RefusedWrite("Job", "tune-train-0", 403, FORBIDDEN, 1, after(60))
    actions = passed(prepared().but(refused_write=refused).build())
    assert actions.ungates == ()
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.CREATE_REFUSED)
    assert FORBIDDEN in message(actions, ConditionType.READY)
    assert "kueue.patchJobs=true" in message(actions, ConditionType.READY)
    assert actions.requeue_after_seconds == 60.0
    due = prepared().but(refused_write=replace(refused, retry_at=T0))
    assert passed(due.build()).ungates == (Ungate("tune-train-0", "uid-train-0", ()),)


def test_a_gate_on_a_run_is_not_looked_at() -> None:
    """A tenant wrote it; without the right to patch Jobs the run would be called stalled."""
    refused = RefusedWrite("Job", "tune-train-0", 403, FORBIDDEN, 1, after(60))
    seen = observing(queued()).training().batch_job(admission_gates=(OURS,)).but(refused_write=refused)
    actions = passed(seen.build())
    assert (actions.ungates, actions.status) == ((), passed(observing(queued()).training().build()).status)


def test_a_later_attempt_has_no_gate() -> None:
    """Preflight has passed long since."""
    again = observing(queued()).prepared().attempt(1).nothing_left()
    body = next(one.body for one in passed(again.build()).creates if one.kind == "Job")
    assert GATES not in body["metadata"]["annotations"]


def test_the_time_in_the_queue_is_no_part_of_the_attempt() -> None:
    admitted = (
        observing(queued()).prepared().but(service_exists=True).batch_job(created=after(-5000), start_time=after(-40)).running()
    )
    (attempt,) = written(passed(admitted.build())).attempts
    assert attempt.start_time == timestamp(after(-40))
    unknown = observing(queued()).prepared().but(service_exists=True).batch_job(created=after(-50), start_time=None).running()
    (attempt,) = written(passed(unknown.build())).attempts
    assert attempt.start_time == timestamp(after(-50))

"""Counters of jobs: each end and each restart that a status says for the first time, from zero on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from finetune_job.api.status import Attempt, FineTuneJobStatus, ProgressStatus, RestartInPod
from finetune_job.conditions import with_condition
from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.client.kinds import JOBS
from finetune_operator.decide.seen.times import timestamp
from finetune_operator.metrics.job_counters import MOST_LABELS, JobCounters
from tests.support.builders import T0, a_job, after, observing
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.metrics.test_job_metrics import a_cache

LABELS = {"namespace": "team", "team": "red", "method": "DoRA", "queue": "night", "profile": "default"}


class Scene:
    """The counters of an operator that knows one job."""

    def __init__(self) -> None:
        document = objects.finetune_job(method={"type": "DoRA"}, run={"queueName": "night"})
        document["metadata"]["labels"] = {"finetune.dev/team": "red"}
        self.cache, self.registry = a_cache(document), CollectorRegistry()
        self.counters = JobCounters(self.cache, self.registry)
        self.before = observing(a_job()).training().status

    def count(self, before: FineTuneJobStatus, after_: FineTuneJobStatus) -> None:
        view = observing(a_job()).build().job
        self.counters.count(replace(view, uid="job-uid", status=before), after_)

    def ended(self, result: str, reason: str, **labels: str) -> float | None:
        return self.registry.get_sample_value("finetune_jobs_total", LABELS | {"result": result, "reason": reason} | labels)

    def restarts(self, failure: str, counted: str) -> float | None:
        labels = {"namespace": "team", "team": "red", "class": failure, "counted": counted}
        return self.registry.get_sample_value("finetune_restarts_total", labels)


def with_end(status: FineTuneJobStatus, succeeded: bool, reason: Reason) -> FineTuneJobStatus:
    conditions = with_condition(
        status.conditions, ConditionType.SUCCEEDED, succeeded, reason, "", generation=1, now=timestamp(T0)
    )
    return status.model_copy(update={"conditions": conditions})


def failed(status: FineTuneJobStatus, failure: FailureClass | None, **more: Any) -> FineTuneJobStatus:
    record = status.attempts[0].model_copy(update={"outcome": AttemptOutcome.FAILED, "failure": failure, "counted": True})
    return status.model_copy(update={"attempts": [record], **more})


def test_an_end_is_counted_once_and_from_zero_on() -> None:
    scene = Scene()
    scene.count(scene.before, scene.before)
    assert (scene.ended("Succeeded", "Completed"), scene.ended("Failed", "VerificationFailed")) == (0, 0)
    verdict = with_end(scene.before, False, Reason.VERIFICATION_FAILED)
    scene.count(scene.before, verdict)
    scene.count(verdict, verdict)
    scene.count(scene.before, with_end(scene.before, False, Reason.CANCELLED))
    scene.count(scene.before, with_end(scene.before, True, Reason.COMPLETED))
    scene.count(scene.before, with_end(scene.before, False, Reason("NewWordOfAnotherRelease")))
    assert scene.ended("Failed", "VerificationFailed") == 1
    assert scene.ended("Cancelled", "Cancelled") == 1
    assert scene.ended("Succeeded", "Completed") == 1
    assert scene.ended("Failed", "Failed") == 1


def test_a_job_that_was_not_accepted_has_no_profile() -> None:
    scene = Scene()
    scene.count(FineTuneJobStatus(), with_end(FineTuneJobStatus(), False, Reason.CANCELLED))
    assert scene.ended("Cancelled", "Cancelled") is None
    assert scene.ended("Cancelled", "Cancelled", profile="other") == 1


def test_a_restart_is_counted_if_the_attempt_failed_and_another_one_follows() -> None:
    scene = Scene()
    scene.count(scene.before, scene.before)
    assert scene.restarts("Collective", "true") == 0
    told = failed(scene.before, FailureClass.COLLECTIVE, attempt=1)
    scene.count(scene.before, told)
    scene.count(told, told)
    assert scene.restarts("Collective", "true") == 1
    # The last failure of a job; an attempt that was suspended; a retry by the user.
    scene.count(scene.before, failed(scene.before, FailureClass.COLLECTIVE))
    suspended = scene.before.attempts[0].model_copy(update={"outcome": AttemptOutcome.SUSPENDED})
    scene.count(scene.before, scene.before.model_copy(update={"attempts": [suspended], "attempt": 1}))
    scene.count(failed(scene.before, FailureClass.COLLECTIVE), told)
    assert scene.restarts("Collective", "true") == 1
    # Another role, of a class that nobody knows.
    merge = Attempt(role=Role.MERGE, number=0, outcome=AttemptOutcome.FAILED)
    scene.count(scene.before, scene.before.model_copy(update={"attempts": [merge], "merge_attempt": 1}))
    assert scene.restarts("Unknown", "false") == 1


def test_durations_are_observed_when_a_job_ends() -> None:
    scene = Scene()
    progress = ProgressStatus(first_step_time=timestamp(after(70)))
    before = scene.before.model_copy(update={"start_time": timestamp(T0), "progress": progress})
    scene.count(before, before)
    queue = {"namespace": "team", "queue": "night"}
    assert scene.registry.get_sample_value("finetune_time_to_first_step_seconds_count", queue) == 0
    scene.count(before, with_end(before, True, Reason.COMPLETED))
    assert scene.registry.get_sample_value("finetune_time_to_first_step_seconds_sum", queue) == 70
    assert scene.registry.get_sample_value("finetune_time_to_first_step_seconds_bucket", queue | {"le": "60.0"}) == 0
    assert scene.registry.get_sample_value("finetune_phase_duration_seconds_count", queue | {"phase": "pending"}) == 1
    assert scene.registry.get_sample_value("finetune_phase_duration_seconds_count", queue | {"phase": "publish"}) == 0


def test_teams_that_users_invent_make_no_more_than_so_many_series() -> None:
    scene = Scene()
    for number in range(MOST_LABELS + 5):
        document = objects.finetune_job(version=number + 2)
        document["metadata"]["labels"] = {"finetune.dev/team": f"team-{number}"}
        scene.cache.take(JOBS, document)
        scene.count(FineTuneJobStatus(), with_end(FineTuneJobStatus(), False, Reason.CANCELLED))
    teams = {
        sample.labels["team"]
        for family in scene.registry.collect()
        for sample in family.samples
        if sample.name == "finetune_jobs_total"
    }
    assert len(teams) == MOST_LABELS + 1
    names = ("team", "method", "queue", "profile")
    assert scene.ended("Cancelled", "Cancelled", **dict.fromkeys(names, "other")) == 5


def test_restarts_inside_a_pod_are_counted_one_by_one() -> None:
    scene = Scene()
    before = scene.before
    for number in (1, 2):
        restarts = [RestartInPod(failure=FailureClass.INTERNAL)] * number
        now = before.model_copy(update={"attempts": [scene.before.attempts[0].model_copy(update={"restarts": restarts})]})
        scene.count(before, now)
        assert scene.restarts("Internal", "true") == number
        before = now
    scene.count(before, before)
    assert (scene.restarts("Internal", "true"), scene.restarts("Stalled", "false")) == (2, 0)

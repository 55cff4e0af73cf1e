"""Fetch: model and data from outside the cluster."""

from dataclasses import replace

import pytest

from finetune_job.api.status import Restarts, RoleRestarts
from finetune_job.failures import FailureClass
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, JobBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written


def fetched_job() -> JobBuilder:
    return a_job().spec("model", {"source": "hf://org/base", "revision": "a" * 40})


def test_the_fetch_job_comes_before_every_other() -> None:
    actions = reconcile(observing(fetched_job()).fetching().build(), T0)
    assert created(actions) == ["Job/tune-fetch-0"]
    assert condition(actions, ConditionType.FETCHED) == ("Unknown", Reason.WAITING_FOR_PODS)
    assert written(actions).phase == "Fetching"


def test_a_job_whose_sources_lie_on_claims_skips_it() -> None:
    seen = replace(observing(a_job()).frozen(), plan_json=observing(a_job()).started().plan_json)
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.FETCHED) == ("True", Reason.SKIPPED)
    assert condition(actions, ConditionType.PREPARED) == ("Unknown", Reason.WAITING_FOR_PODS)
    assert written(actions).phase == "Preflight"
    assert created(actions) == ["Job/tune-preflight-0"]


def test_success_hands_over_to_preflight() -> None:
    seen = observing(fetched_job()).fetching().succeeded(bytes="10")
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.FETCHED) == ("True", Reason.COMPLETED)
    assert created(actions) == ["Job/tune-preflight-0"], "in the same pass: one status write for both"
    assert [(one.role, one.number, one.outcome) for one in written(actions).attempts] == [("fetch", 0, "Succeeded")]


@pytest.mark.parametrize("failure", [FailureClass.USER_MODEL, FailureClass.USER_DATA])
def test_a_source_that_is_closed_waits_for_a_human(failure: FailureClass) -> None:
    seen = observing(fetched_job()).fetching().failed_pod(0, failure, message="401 from the hub").batch_job_failed()
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.FETCH_REFUSED)
    assert condition(actions, ConditionType.FETCHED) == ("False", Reason.FETCH_REFUSED)
    assert "401 from the hub" in message(actions, ConditionType.STALLED)
    refused = replace(seen, status=written(actions))
    assert reconcile(refused.build(), T0).status is None
    retried = replace(refused, job=fetched_job().run(retry=1))
    again = reconcile(retried.build(), T0)
    assert (written(again).fetch_attempt, written(again).retry_handled) == (1, 1)
    assert deleted(again) == ["Job/tune-fetch-0"]


def test_a_hub_that_does_not_answer_is_waited_for_a_day_visibly_and_costs_no_budget() -> None:
    seen = observing(fetched_job().run(maxRestarts=0)).fetching().failed_pod(0, FailureClass.SOURCE_UNAVAILABLE, message="503")
    seen = seen.batch_job_failed()
    actions = reconcile(seen.build(), T0)
    status = written(actions)
    assert (status.fetch_attempt, status.role_restarts.fetch.counted, status.role_restarts.fetch.uncounted) == (1, 0, 1)
    assert deleted(actions) == ["Job/tune-fetch-0"]
    assert condition(actions, ConditionType.FETCHED) == ("Unknown", Reason.WAITING_FOR_SOURCE)
    said = message(actions, ConditionType.FETCHED)
    assert "503" in said
    assert "The next attempt starts at 2026-01-01T12:00:" in said
    assert "It is tried until 2026-01-02T12:00:00Z." in said
    waiting = replace(seen, status=status, batch_jobs=(), pods=()).nothing_left()
    early = reconcile(waiting.build(), after(5))
    assert (early.status, created(early)) == (None, [])
    assert created(reconcile(waiting.build(), after(30))) == ["Job/tune-fetch-1"]
    long_ago = RoleRestarts(fetch=Restarts(uncounted=300, in_a_row=300, in_a_row_since="2025-12-31T11:59:00Z"))
    given_up = reconcile(seen.with_status(role_restarts=long_ago).build(), T0)
    assert condition(given_up, ConditionType.STALLED) == ("True", Reason.FETCH_STOPPED)
    assert condition(given_up, ConditionType.FINISHED)[0] != "True"

"""Before which Jobs a live list has to show that nothing of an earlier one runs. Each list costs requests in each pass."""

from dataclasses import replace

import pytest

from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.stages.blocked import needs_live_list
from tests.support.builders import ObservedBuilder, a_job, observing


def begun(**run: object) -> ObservedBuilder:
    """The training of a job comes next."""
    return observing(a_job().run(**run)).prepared()


def running(seen: ObservedBuilder) -> ObservedBuilder:
    """An earlier pass said that the current Job runs."""
    return seen.condition(ConditionType.TRAINED, None, Reason.RUNNING)


@pytest.mark.parametrize("reason", [Reason.PENDING, Reason.NOT_OBSERVED, Reason.CREATE_REFUSED])
def test_before_the_first_job_of_a_role_nothing_is_listed(reason: Reason) -> None:
    assert not needs_live_list(begun().condition(ConditionType.TRAINED, None, reason).build())


def test_before_a_later_attempt_and_where_the_job_has_vanished_everything_is_listed() -> None:
    assert needs_live_list(begun().attempt(1).build())
    assert needs_live_list(running(begun()).build())


def test_where_the_job_exists_nothing_is_listed() -> None:
    assert not needs_live_list(running(begun()).batch_job().build())
    assert not needs_live_list(begun().attempt(1).batch_job(attempt=1).build())
    # A Job of the attempt before is what the list is for.
    assert needs_live_list(begun().attempt(1).batch_job(attempt=0).build())


def test_while_a_job_is_suspended_everything_is_listed_unless_its_job_is_known() -> None:
    assert needs_live_list(begun(suspend=True).build())
    assert not needs_live_list(running(begun(suspend=True)).batch_job().build())


def test_a_cancelled_job_is_finished_only_by_what_is_listed() -> None:
    cancelled = running(begun()).condition(ConditionType.SUCCEEDED, False, Reason.CANCELLED)
    assert needs_live_list(cancelled.build())
    assert not needs_live_list(cancelled.condition(ConditionType.FINISHED, True, Reason.CANCELLED).build())
    assert not needs_live_list(cancelled.with_status(start_time="").build())


def test_for_a_job_that_creates_nothing_now_nothing_is_listed() -> None:
    assert not needs_live_list(running(begun()).condition(ConditionType.FINISHED, True, Reason.COMPLETED).build())
    assert not needs_live_list(running(begun()).with_status(start_time="").build())
    seen = running(begun()).build()
    assert not needs_live_list(replace(seen, job=replace(seen.job, spec=None, spec_error="spec.training: is missing")))

"""A manifest whose judgement takes too long: refused before the start, and never a reason to stop what has started."""

from dataclasses import replace

from finetune_job.conditions import find_condition
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, a_job, observing


def validated(actions: Actions) -> tuple[str, Reason]:
    assert actions.status is not None
    condition = find_condition(actions.status.conditions, ConditionType.VALIDATED)
    assert condition is not None
    return condition.status, Reason(condition.reason)


def too_complex() -> Observed:
    return replace(observing(a_job()).build(), too_complex=True)


def refused() -> Observed:
    """After the refusal was written, as an operator sees it that has just started."""
    status = reconcile(too_complex(), T0).status
    assert status is not None
    seen = observing(a_job()).build()
    return replace(seen, job=replace(seen.job, status=status))


def test_it_is_refused_with_the_fix_and_nothing_is_created() -> None:
    actions = reconcile(too_complex(), T0)
    assert validated(actions) == ("False", Reason.TOO_COMPLEX)
    assert actions.creates == ()
    assert actions.status is not None
    assert not actions.status.start_time
    stalled = find_condition(actions.status.conditions, ConditionType.STALLED)
    assert stalled is not None
    assert "spec.run.retry" in stalled.message


def test_it_stays_refused_after_a_restart_of_the_operator() -> None:
    assert reconcile(refused(), T0).status is None


def test_its_next_generation_is_judged_again() -> None:
    seen = refused()
    actions = reconcile(replace(seen, job=replace(seen.job, generation=2)), T0)
    assert validated(actions) == ("True", Reason.ACCEPTED)


def test_started_job_goes_on() -> None:
    seen = observing(a_job()).training().build()
    assert reconcile(replace(seen, too_complex=True), T0) == reconcile(seen, T0)

"""A job that is deleted and that a finalizer holds; tests/simulation/test_deleted_jobs.py sees that nothing of it runs on."""

from dataclasses import replace

import pytest

from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import LiveChildren, LiveJob, LivePod
from finetune_operator.decide.seen.observed import Observed
from finetune_operator.decide.stages.blocked import needs_live_list
from tests.support.builders import T0, ObservedBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, written


def gone(seen: ObservedBuilder) -> Observed:
    observed = seen.build()
    return replace(observed, job=replace(observed.job, deleting=True))


@pytest.mark.parametrize(
    "seen",
    [
        observing(a_job()).frozen(),
        observing(a_job()).prepared(),
        observing(a_job()).training(attempt=1).batch_job_failed(),
        observing(a_job()).trained(),
        observing(a_job().run(cancel=True)).training(),
        observing(a_job().run(suspend=True)).training(),
    ],
)
def test_nothing_is_made_of_it_and_its_end_is_not_decided(seen: ObservedBuilder) -> None:
    actions = reconcile(gone(seen.nothing_left()), after(10**6))
    assert created(actions) == []
    assert written(actions).phase == "Stopping"
    assert condition(actions, ConditionType.SUCCEEDED)[0] == "Unknown"


def test_what_no_watch_shows_is_looked_for_once_nothing_else_is_left() -> None:
    seen = observing(a_job()).prepared()
    assert needs_live_list(gone(seen))
    assert not needs_live_list(gone(seen.batch_job()))
    assert not needs_live_list(gone(observing(a_job())))
    hidden = LiveChildren((LiveJob("tune-train-0", "hidden-uid"),), (LivePod("tune-train-0-0", "pod-uid", "node-a"),))
    actions = reconcile(gone(seen.but(live=hidden)), T0)
    assert [(one.name, one.uid) for one in actions.deletes] == [("tune-train-0", "hidden-uid")]
    assert actions.requeue_after_seconds == 30


def test_job_that_has_not_started_is_left_to_the_garbage_collector() -> None:
    assert reconcile(gone(observing(a_job())), T0) == Actions()


def test_job_whose_end_is_decided_comes_to_it() -> None:
    seen = observing(a_job().run(cancel=True)).training()
    ended = replace(seen, status=written(reconcile(seen.build(), T0)), batch_jobs=(), pods=())
    actions = reconcile(gone(ended.nothing_left()), after(60))
    assert condition(actions, ConditionType.FINISHED) == ("True", Reason.CANCELLED)

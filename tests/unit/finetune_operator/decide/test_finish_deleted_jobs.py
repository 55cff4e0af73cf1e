"""A job that somebody has deleted and a finalizer holds: what runs of it is stopped, and nothing is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.actions import Actions
from finetune_operator.decide.blocked import needs_live_list
from finetune_operator.decide.children_seen import LiveChildren, LiveJob, LivePod
from finetune_operator.decide.observed import Observed
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, ObservedBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written


def gone(seen: ObservedBuilder, *, orphaning: bool = False) -> Observed:
    observed = seen.build()
    return replace(observed, job=replace(observed.job, deleting=True, orphaning=orphaning))


def test_its_jobs_are_deleted_and_its_status_says_so() -> None:
    actions = reconcile(gone(observing(a_job().nodes(2)).training()), T0)
    assert (deleted(actions), created(actions)) == (["Job/tune-train-0"], [])
    assert actions.deletes[0].uid == "uid-train-0"
    assert written(actions).phase == "Stopping"
    assert condition(actions, ConditionType.FINISHED) == ("False", Reason.STOPPING)
    assert condition(actions, ConditionType.READY) == ("False", Reason.STOPPING)
    assert "Waiting until pod tune-train-0-0 on node node-a, pod tune-train-0-1" in message(actions, ConditionType.FINISHED)
    assert actions.requeue_after_seconds == 30


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


def test_once_nothing_runs_it_is_not_looked_at_again_and_nothing_is_written() -> None:
    seen = observing(a_job()).prepared().nothing_left()
    first = reconcile(gone(seen), T0)
    assert message(first, ConditionType.FINISHED).endswith("Nothing of it runs any more.")
    assert first.requeue_after_seconds is None
    assert reconcile(gone(replace(seen, status=written(first))), after(60)).status is None


def test_what_no_watch_shows_is_looked_for_once_nothing_else_is_left() -> None:
    seen = observing(a_job()).prepared()
    assert needs_live_list(gone(seen))
    assert not needs_live_list(gone(seen.batch_job()))
    assert not needs_live_list(gone(observing(a_job())))
    hidden = LiveChildren((LiveJob("tune-train-0", "hidden-uid"),), (LivePod("tune-train-0-0", "pod-uid", "node-a"),))
    actions = reconcile(gone(seen.but(live=hidden)), T0)
    assert [(one.name, one.uid) for one in actions.deletes] == [("tune-train-0", "hidden-uid")]
    assert actions.requeue_after_seconds == 30


def test_what_is_orphaned_on_purpose_is_left() -> None:
    assert reconcile(gone(observing(a_job()).training(), orphaning=True), T0) == Actions()


def test_job_that_has_not_started_is_left_to_the_garbage_collector() -> None:
    assert reconcile(gone(observing(a_job())), T0) == Actions()


def test_job_whose_end_is_decided_comes_to_it() -> None:
    seen = observing(a_job().run(cancel=True)).training()
    ended = replace(seen, status=written(reconcile(seen.build(), T0)), batch_jobs=(), pods=())
    actions = reconcile(gone(ended.nothing_left()), after(60))
    assert condition(actions, ConditionType.FINISHED) == ("True", Reason.CANCELLED)

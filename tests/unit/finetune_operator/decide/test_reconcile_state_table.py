"""The states of a job and the ways out of each, one test for each way: Pending, Stalled before and after the start, Started,
Suspended, and the ends. What each state allows of children is asserted with it.
"""

from dataclasses import replace

import pytest

from finetune_job.conditions import find_condition
from finetune_job.names import Role
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.observed import ProfileView
from tests.support.builders import T0, ObservedBuilder, a_job, observing
from tests.support.simulated_cluster import SimulatedCluster
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, written


def phase_after(seen: ObservedBuilder) -> str:
    return written(reconcile(seen.build(), T0)).phase


@pytest.mark.parametrize("trouble", ["profile", "claim"])
def test_stalled_before_the_start_to_started_once_the_cause_is_gone(trouble: str) -> None:
    seen = observing(a_job())
    broken = seen.but(profile=ProfileView("default")) if trouble == "profile" else seen.but(missing_claims=frozenset({"data"}))
    actions = reconcile(broken.build(), T0)
    assert (written(actions).phase, created(actions)) == ("Stalled", [])
    healed = reconcile(replace(seen, status=written(actions)).build(), T0)
    assert condition(healed, ConditionType.STALLED) == ("False", Reason.HEALTHY)
    assert created(healed)


def test_pending_to_suspended_and_from_there_to_started() -> None:
    actions = reconcile(observing(a_job().run(suspend=True)).build(), T0)
    held = written(actions)
    assert (held.phase, held.start_time) == ("Suspended", "")
    assert condition(actions, ConditionType.SUSPENDED) == ("True", Reason.SUSPENDED_BY_USER)
    assert created(reconcile(observing(a_job()).but(status=held).build(), T0))


@pytest.mark.parametrize("start", ["pending", "stalled", "suspended"])
def test_before_the_start_to_cancelled(start: str) -> None:
    job = {"pending": a_job(), "stalled": a_job().nodes(5), "suspended": a_job().run(suspend=True)}[start]
    before = written(reconcile(observing(job).build(), T0)) if start != "pending" else observing(job).status
    assert phase_after(observing(job.run(cancel=True)).but(status=before)) == "Cancelled"


@pytest.mark.parametrize("role", list(Role))
def test_started_to_suspended_and_back_as_a_new_attempt_that_counts_for_nothing(role: Role) -> None:
    job = (
        a_job().spec("data.source", "s3://bucket/train.jsonl").spec("output.destination", "oci://registry.example/team/tuned:v1")
    )
    stages = {
        Role.FETCH: lambda seen: seen.fetching(),
        Role.PREFLIGHT: lambda seen: seen.started(),
        Role.TRAIN: lambda seen: seen.prepared(),
        Role.MERGE: lambda seen: seen.trained(),
        Role.PUBLISH: lambda seen: seen.merged(),
    }
    running = stages[role](observing(job)).but(service_exists=True).batch_job().running()
    ran = replace(running, status=written(reconcile(running.build(), T0)))
    held = reconcile(replace(ran, job=job.run(suspend=True)).build(), T0)
    assert (written(held).phase, deleted(held), created(held)) == ("Suspended", [f"Job/tune-{role}-0"], [])
    assert [(one.role, one.number, one.outcome) for one in written(held).attempts] == [(role, 0, "Suspended")]
    resumed = replace(ran, status=written(held), batch_jobs=(), pods=()).nothing_left()
    back = reconcile(resumed.build(), T0)
    assert created(back) == [f"Job/tune-{role}-1"]
    budgets = written(back).role_restarts
    counters = [written(back).restarts, budgets.fetch, budgets.preflight, budgets.merge, budgets.publish]
    assert all((one.counted, one.uncounted, one.in_a_row) == (0, 0, 0) for one in counters)


def test_suspended_to_cancelled() -> None:
    held = written(reconcile(observing(a_job().run(suspend=True)).training().build(), T0))
    seen = observing(a_job().run(suspend=True, cancel=True)).prepared().but(status=held)
    assert phase_after(seen.nothing_left()) == "Cancelled"


@pytest.mark.parametrize("change", [{"suspend": True}, {"cancel": True}])
def test_stalled_after_the_start_obeys_its_user(change: dict[str, bool]) -> None:
    seen = observing(a_job()).training()
    lost = written(reconcile(seen.but(plan_json="").build(), T0))
    phase = phase_after(replace(seen, status=lost, job=a_job().run(**change), plan_json=""))
    assert phase == ("Suspended" if "suspend" in change else "Stopping")


def test_a_whole_life_takes_few_writes() -> None:
    """The promise: no more writes than children, transitions of conditions, and two."""
    cluster = SimulatedCluster(a_job().nodes(2))
    writes, events, transitions = 0, 0, 0
    for _ in range(40):
        before = {one.type: (one.status, one.reason) for one in cluster.status.conditions}
        actions = cluster.reconcile_once()
        writes += actions.status is not None
        events += len(actions.events)
        after = {one.type: (one.status, one.reason) for one in cluster.status.conditions}
        transitions += sum(before.get(kind) != state for kind, state in after.items())
        cluster.catch_up()
        cluster.start_pods()
        cluster.catch_up()
        actions = cluster.reconcile_once()
        writes += actions.status is not None
        events += len(actions.events)
        cluster.succeed_all()
        cluster.job_controller()
        cluster.catch_up()
        cluster.pass_time(1)
    succeeded = find_condition(cluster.status.conditions, ConditionType.SUCCEEDED)
    assert succeeded.status == "True"
    assert len(cluster.created) == 6, "network policy, plan, preflight, service, training, merge"
    assert writes <= 7, "accepted; runs and is done, thrice; the last of them ends the job"
    assert events <= 3
    assert writes + events + len(cluster.created) <= len(cluster.created) + transitions + 2

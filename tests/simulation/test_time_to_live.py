"""After its time to live nothing is left of a job but the FineTuneJob and its claims, and nobody else's object is gone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from finetune_job.names import LABEL_MANAGED_BY, MANAGED_BY
from finetune_operator.client.kinds import BATCH_JOBS, CLAIMS, CONFIG_MAPS, JOBS, NETWORK_POLICIES, SERVICES
from tests.simulation.controllers import is_true
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import CLAIM_NAMES, TEAM, World, a_manifest

CHILDREN = (BATCH_JOBS, CONFIG_MAPS, SERVICES, NETWORK_POLICIES)


def a_world(**manifest: Any) -> tuple[VirtualLoop, World]:
    loop = VirtualLoop()
    world = World(loop, random.Random("time to live"))
    world.people_prepare([a_manifest(TEAM, "tune", nodes=2, ttlSecondsAfterFinished=3600, **manifest)], {})
    return loop, world


def left(world: World) -> list[str]:
    return [f"{kind.name}/{item['metadata']['name']}" for kind in CHILDREN for item in world.server.all(kind)]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_nothing_is_left_but_the_job_and_its_claims(elsewhere: bool, restarted: bool) -> None:
    loop, world = a_world(elsewhere=elsewhere)

    async def story() -> None:
        world.start_operator()
        await world.rest(20, succeed=True)
        (job,) = world.server.all(JOBS)
        assert is_true(job, "Succeeded")
        assert {kind for kind in CHILDREN if world.server.all(kind)} == set(CHILDREN)
        world.server.create(NETWORK_POLICIES, TEAM, {"metadata": {"name": "tune-of-the-team"}, "spec": {}})
        if restarted and world.operator is not None:
            world.operator.kill()
        await world.rest(70, succeed=True)
        calls = world.invariants.num_calls
        await world.rest(9, succeed=True, quiet=True)
        assert world.invariants.num_calls - calls < 30, "nothing is looked up any more"

    run(story(), loop)
    assert left(world) == ["NetworkPolicy/tune-of-the-team"]
    assert {item["metadata"]["name"] for item in world.server.all(CLAIMS)} == set(CLAIM_NAMES)


def test_network_policy_of_a_stranger_under_the_name_of_a_childs_is_left() -> None:
    loop, world = a_world()

    async def story() -> None:
        world.start_operator()
        await world.rest(20, succeed=True)
        ours = world.server.get(NETWORK_POLICIES, TEAM, "tune-run")
        world.delete(NETWORK_POLICIES, ours)
        world.server.create(NETWORK_POLICIES, TEAM, {"metadata": {"name": "tune-run"}, "spec": {}})
        await world.rest(70, succeed=True)

    run(story(), loop)
    assert left(world) == ["NetworkPolicy/tune-run"]


def test_service_of_a_stranger_under_the_name_of_a_childs_is_left() -> None:
    loop, world = a_world()

    async def story() -> None:
        world.start_operator()
        await world.rest(20, succeed=True)
        (job,) = world.server.all(JOBS)
        assert is_true(job, "Succeeded")
        ours = world.server.get(SERVICES, TEAM, "tune-gang")
        world.delete(SERVICES, ours)
        world.server.create(SERVICES, TEAM, {"metadata": {"name": "tune-gang"}, "spec": {}})
        # The job does own a Service, which somebody has made for it.
        references, labels = ours["metadata"]["ownerReferences"], {LABEL_MANAGED_BY: MANAGED_BY}
        extra = {"metadata": {"name": "extra", "labels": labels, "ownerReferences": references}, "spec": {}}
        world.server.create(SERVICES, TEAM, extra)
        await world.rest(70, succeed=True)

    run(story(), loop)
    assert "Service/tune-gang" in left(world)
    assert "ConfigMap/tune-plan" not in left(world)

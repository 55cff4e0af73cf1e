"""After its time to live nothing is left of a job but the FineTuneJob and its claims, and nobody else's object is gone."""

from __future__ import annotations

import random
from typing import Any

from finetune_job.names import LABEL_MANAGED_BY, MANAGED_BY
from finetune_operator.cluster.kinds import BATCH_JOBS, CONFIG_MAPS, JOBS, NETWORK_POLICIES, SERVICES
from tests.simulation.controllers import is_true
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest

CHILDREN = (BATCH_JOBS, CONFIG_MAPS, SERVICES, NETWORK_POLICIES)


def a_world(**manifest: Any) -> tuple[VirtualLoop, World]:
    loop = VirtualLoop()
    world = World(loop, random.Random("time to live"))
    world.people_prepare([a_manifest(TEAM, "tune", nodes=2, ttlSecondsAfterFinished=3600, **manifest)], {})
    return loop, world


def left(world: World) -> list[str]:
    return [f"{kind.name}/{item['metadata']['name']}" for kind in CHILDREN for item in world.server.all(kind)]


def test_service_of_a_stranger_under_the_name_of_a_childs_is_left() -> None:
    loop, world = a_world()

    async def story() -> None:
        world.start_operator()
        await world.rest(20, succeed=True)
        (job,) = world.server.all(JOBS)
        assert is_true(job, "Succeeded")
        ours = world.server.get(SERVICES, TEAM, "tune-gang")
        assert ours is not None
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

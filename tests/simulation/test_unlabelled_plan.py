"""Somebody takes the label off by which children are watched, and the operator is restarted: nothing of the job is lost."""

import random

import pytest

from finetune_operator.client.kinds import CONFIG_MAPS, JOBS
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest


@pytest.mark.parametrize("deleted", [False, True])
def test_a_plan_without_label_is_found_and_one_that_is_gone_is_said_to_be(deleted: bool) -> None:
    world = World(VirtualLoop(), random.Random("unlabelled"))
    world.people_prepare([a_manifest(TEAM, "tune")], {})
    world.start_operator()

    async def live() -> None:
        await world.rest(2, succeed=False)
        plan = world.server.get(CONFIG_MAPS, TEAM, "tune-plan")
        world.unlabel(CONFIG_MAPS, plan)
        if deleted:
            world.delete(CONFIG_MAPS, world.server.get(CONFIG_MAPS, TEAM, "tune-plan") or {})
        world.operator.kill()
        await world.rest(20, succeed=True)

    run(live(), world.loop)
    (job,) = world.server.all(JOBS)
    reasons = [one["reason"] for one in job["status"]["conditions"] if one["type"] == "Stalled"]
    assert (job["status"]["phase"], reasons) == (("Stalled", ["PlanLost"]) if deleted else ("Succeeded", ["Healthy"]))

"""The watches are silent for two minutes: what is irrevocable is not decided by what they have told before."""

import asyncio
import random

import pytest

from finetune_operator.client.kinds import BATCH_JOBS, JOBS, PODS
from tests.simulation.controllers import phase_of
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest


def a_world() -> World:
    """Nodes that pull no image, and a job that nobody has applied yet."""
    world = World(VirtualLoop(), random.Random("late"))
    world.people_prepare([], {})
    world.restore_claims(TEAM)
    world.manifests[TEAM, "tune"] = a_manifest(TEAM, "tune", startupDeadlineSeconds=60)
    for node in world.nodes.nodes:
        node.starts_pods = False
    return world


@pytest.mark.parametrize(
    "change", ["the pod starts", "the Job is deleted", "the Job is deleted with its pod", "the pod goes a minute after its Job"]
)
def test_a_job_is_not_given_up_by_what_was_known_of_its_pods_before(change: str) -> None:
    world = a_world()

    async def live() -> None:
        world.start_operator()
        # The next comparison with the cluster's own lists is ten minutes away.
        await asyncio.sleep(40.0)
        process = world.running_operator()
        assert process is not None
        world.apply(TEAM, "tune")
        process.deliver_all()
        await asyncio.sleep(1.0)
        for _ in range(2):
            world.cluster_works()
        process.deliver_all()
        await asyncio.sleep(1.0)
        for node in world.nodes.nodes:
            node.starts_pods = True
        if change == "the pod starts":
            world.cluster_works()
            assert [phase_of(pod) for pod in world.server.all(PODS)] == ["Running"]
        else:
            (job,) = world.server.all(BATCH_JOBS)
            world.delete(BATCH_JOBS, job, policy="Background")
            if change == "the Job is deleted with its pod":
                world.cluster_works()
        await asyncio.sleep(60.0)
        if change == "the pod goes a minute after its Job":
            world.cluster_works()
        await asyncio.sleep(60.0)
        world.check()
        (finetune_job,) = world.server.all(JOBS)
        assert finetune_job["status"]["phase"] == "Preflight"
        await world.rest(20, succeed=True)

    run(live(), world.loop)
    (job,) = world.server.all(JOBS)
    assert job["status"]["phase"] == "Succeeded"


def test_a_job_whose_pods_do_not_start_is_given_up() -> None:
    world = a_world()
    world.apply(TEAM, "tune")
    world.start_operator()
    run(world.rest(3, succeed=True), world.loop)
    (job,) = world.server.all(JOBS)
    reasons = [one["reason"] for one in job["status"]["conditions"] if one["type"] == "Succeeded"]
    assert reasons == ["StartupDeadlineExceeded"]

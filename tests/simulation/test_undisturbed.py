"""Nothing fails: each job takes the shortest way, and writes no more than it must."""

import random

import pytest

from finetune_operator.client.kinds import JOBS
from tests.simulation.api_server import Document
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest


def lived(manifest: Document) -> World:
    loop = VirtualLoop()
    world = World(loop, random.Random("undisturbed"))
    world.people_prepare([manifest], {})
    world.start_operator()
    run(world.rest(20, succeed=True), loop)
    return world


@pytest.mark.parametrize(
    ("nodes", "elsewhere", "roles"),
    [(1, False, ["preflight", "train", "merge"]), (3, True, ["fetch", "preflight", "train", "merge", "publish"])],
)
def test_a_job_succeeds_with_one_job_per_role(nodes: int, elsewhere: bool, roles: list[str]) -> None:
    world = lived(a_manifest(TEAM, "tune", nodes=nodes, elsewhere=elsewhere))
    (life,) = world.invariants.lives.values()
    assert life.created_jobs == {(role, 0): 1 for role in roles}
    (job,) = world.server.all(JOBS)
    assert job["status"]["phase"] == "Succeeded"


def test_an_elastic_gang_takes_what_there_is_grows_when_it_has_saved_and_never_runs_twice() -> None:
    loop = VirtualLoop()
    world = World(loop, random.Random("elastic"))
    # Room for two pods in all; the profile waits for a minute.
    for node, room in zip(world.nodes.nodes, (1, 1, 0), strict=True):
        node.room = room
    waits = {"shrinkAfterSeconds": 60, "growAfterSeconds": 120}
    world.people_prepare([a_manifest(TEAM, "tune", nodes=3, fewest=2)], {"elastic": waits})

    async def live() -> None:
        world.start_operator()
        await world.rest(2, succeed=True)
        await world.rest(4, succeed=False)
        for node in world.nodes.nodes:
            node.room = 1
        for step in (5, 6):
            (job,) = world.server.all(JOBS)
            world.tell_progress(job, step)
            await world.rest(3, succeed=False)
        await world.rest(10, succeed=True)

    run(live(), loop)
    (job,) = world.server.all(JOBS)
    training = [one for one in job["status"]["attempts"] if one["role"] == "train"]
    assert [(one["outcome"], one["nodes"]) for one in training] == [("Resized", 3), ("Resized", 2), ("Succeeded", 3)]
    assert (job["status"]["phase"], job["status"]["restarts"]["uncounted"]) == ("Succeeded", 0)


def test_status_is_written_only_for_news() -> None:
    world = lived(a_manifest(TEAM, "tune", nodes=2, elsewhere=True))
    (life,) = world.invariants.lives.values()
    assert len(life.status_writes) <= life.transitions, "each write tells of a condition that changed"
    assert len(life.status_writes) <= 5 * 4 + 2, "four for each role, and two for the freeze"


def test_an_operator_without_jobs_only_lists() -> None:
    loop = VirtualLoop()
    world = World(loop, random.Random("idle"))
    world.people_prepare([], {})
    world.start_operator()
    run(world.rest(15, succeed=True), loop)
    assert world.num_lives == 1
    lists = 3 * 6
    assert world.invariants.num_calls <= lists, "each kind at the start, after half a minute, and ten minutes later"

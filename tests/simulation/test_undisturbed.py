"""Nothing fails: each job takes the shortest way, and writes no more than it must."""

import random

import pytest

from finetune_operator.cluster.kinds import JOBS
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


def test_status_is_written_only_when_something_is_to_be_told() -> None:
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
    assert world.invariants.num_calls <= lists + 1, "each kind at the start, after half a minute, and ten minutes later; accounts"

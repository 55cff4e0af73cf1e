"""Gangs of one pod run their next attempts there, whatever dies in between: a walk of its own, in which ranks fail often."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from finetune_job.failures import FailureClass
from finetune_operator.cluster.kinds import JOBS
from finetune_operator.decide.pass_result import PassResult
from tests.simulation.controllers import phase_of
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest, role_of

FAULTS = (FailureClass.INTERNAL, FailureClass.INTERNAL, FailureClass.COLLECTIVE, FailureClass.STALLED, FailureClass.DISK_FULL)
ROUNDS = 2000
JOBS_AT_A_TIME = 3


async def _live(world: World, rng: random.Random) -> None:
    """Jobs train, their ranks fail, the operator dies, requests fail, nodes are of two releases, people suspend and delete."""
    world.weather.faults, world.weather.deaths = 0.05, 0.01
    world.nodes.nodes[0].knows_rules = False
    for number in range(ROUNDS):
        if world.operator is None or not world.operator.is_alive:
            world.start_operator()
        world.cluster_works()
        if (process := world.running_operator()) and rng.random() < 0.8:
            process.deliver_all()
        if len(world.server.all(JOBS)) < JOBS_AT_A_TIME:
            manifest = a_manifest(TEAM, f"tune-{number}", nodes=1, maxRestarts=100)
            world.manifests[TEAM, f"tune-{number}"] = manifest
            world.restore_claims(TEAM)
            world.apply(TEAM, f"tune-{number}")
        for job in world.batch_jobs_running():
            if rng.random() < (0.005 if role_of(job) == "train" else 0.5):
                world.succeed(job)
        for pod in world.nodes.running(lambda pod: role_of(pod) == "train"):
            if phase_of(pod) == "Running" and rng.random() < 0.05:
                world.nodes.end(pod, rng.choice(FAULTS))
        for job in world.server.all(JOBS):
            chance = rng.random()
            if chance < 0.3:
                world.tell_progress(job, number)
            elif chance < 0.303:
                world.edit_run(job, suspend=not job["spec"].get("run", {}).get("suspend", False))
            elif chance < 0.305:
                world.remove_job(job, rng.choice(["Background", "Foreground"]))
        await asyncio.sleep(rng.choice([0.2, 1.0, 5.0]))
        world.check()
    world.weather.faults = world.weather.deaths = 0.0
    await world.faults_stop()
    await world.everything_heals()


def test_a_pod_that_is_told_of_another_attempt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = PassResult.relabel
    monkeypatch.setattr(PassResult, "relabel", lambda self, pod, attempt: told(self, pod, attempt + 1))
    loop = VirtualLoop()
    rng = random.Random("another attempt")
    world = World(loop, rng)
    world.people_prepare([], {})
    world.invariants.counted_faults = True
    with pytest.raises(AssertionError, match=r"of attempt (\d) may run attempt \d, status: \d"):
        run(_live(world, rng), loop)


@pytest.mark.parametrize("seed", range(2))
def test_pods_run_their_second_attempts_and_every_job_comes_to_rest(seed: int) -> None:
    loop = VirtualLoop()
    rng = random.Random(f"same pod {seed}")
    world = World(loop, rng)
    world.people_prepare([], {})
    world.invariants.counted_faults = True
    run(_live(world, rng), loop)
    trained = [one for one in world.nodes.begun.values() if one]
    begun = Counter(map(len, trained))
    print(f"{world.invariants.num_continued} pods told, {dict(begun)} attempts per pod, {world.num_lives} lives of the operator")
    assert begun[2] > 5
    assert begun[1] > 20
    assert set(begun) == {1, 2}
    assert world.num_lives > 10
    # Each container ran what its pod's label named: one attempt after the other, and never one twice.
    assert [one for one in trained if one != list(range(one[0], one[0] + len(one)))] == []

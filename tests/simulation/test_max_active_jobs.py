"""`maxActiveJobs` holds at every moment, whatever makes many jobs ready at once, and whatever becomes of the requests."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from finetune_operator.client.kinds import CLAIMS, JOBS, PROFILES
from tests.simulation.api_server import Change
from tests.simulation.controllers import is_true
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest


class Team:
    """Jobs of one namespace, and how many of them were ever active at once."""

    def __init__(self, jobs: int, seed: str = "line", **profile: Any) -> None:
        self.loop = VirtualLoop()
        self.world = World(self.loop, random.Random(seed))
        self.most_active = 0
        self.world.server.watchers.append(self._saw)
        self.world.people_prepare([a_manifest(TEAM, f"tune-{number}") for number in range(jobs)], profile)

    def _saw(self, change: Change) -> None:
        if change.kind == JOBS:
            jobs = self.world.server.all(JOBS)
            active = [job for job in jobs if "startTime" in (job.get("status") or {}) and not is_true(job, "Finished")]
            self.most_active = max(self.most_active, len(active))

    def delete_claim(self, name: str) -> None:
        claim = self.world.server.get(CLAIMS, TEAM, name)
        self.world.delete(CLAIMS, claim)

    def edit_profile(self, **fields: Any) -> None:
        (profile,) = self.world.server.all(PROFILES)
        self.world.server.update(PROFILES, profile, lambda item: item["spec"].update(fields))

    def num_started(self) -> int:
        return sum("startTime" in (job.get("status") or {}) for job in self.world.server.all(JOBS))

    def live(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        run(story(), self.loop)


@pytest.mark.parametrize("restarted", [False, True])
def test_jobs_that_wait_for_a_claim_start_one_after_the_other_once_it_is_there(restarted: bool) -> None:
    team = Team(12, maxActiveJobs=1)
    team.delete_claim("scratch")

    async def story() -> None:
        team.world.start_operator()
        await team.world.rest(2, succeed=True)
        assert team.num_started() == 0
        if restarted and team.world.operator is not None:
            team.world.operator.kill()
        team.world.restore_claims(TEAM)
        await team.world.rest(120, succeed=True)

    team.live(story)
    assert team.most_active == 1
    assert all(is_true(job, "Succeeded") for job in team.world.server.all(JOBS))


def test_the_next_job_starts_as_soon_as_one_has_ended() -> None:
    """By the operator's own write: it is not left until the next look at the line."""
    team = Team(4, maxActiveJobs=1)
    waits: list[float] = []
    ended: list[float] = []

    def saw(change: Change) -> None:
        if change.kind != JOBS or change.before is None or change.after is None:
            return
        if "startTime" in change.after.get("status", {}) and "startTime" not in change.before.get("status", {}) and ended:
            waits.append(team.loop.time() - ended[-1])
        if is_true(change.after, "Finished") and not is_true(change.before, "Finished"):
            ended.append(team.loop.time())

    team.world.server.watchers.append(saw)

    async def story() -> None:
        team.world.start_operator()
        await team.world.rest(30, succeed=True)

    team.live(story)
    assert len(ended) == 4
    assert len(waits) == 3
    assert max(waits) < 5


def test_jobs_that_a_profile_did_not_allow_start_within_its_limit_once_it_does() -> None:
    team = Team(60, maxActiveJobs=2, allowedNamespaces=["other"])

    async def story() -> None:
        team.world.start_operator()
        await team.world.rest(2, succeed=True)
        assert team.num_started() == 0
        team.edit_profile(allowedNamespaces=[TEAM])
        await team.world.rest(20, succeed=True)

    team.live(story)
    assert team.most_active == 2
    assert team.num_started() > 2


def test_place_of_a_job_is_not_written_each_time_an_older_one_is_resumed() -> None:
    team = Team(40, maxActiveJobs=1)

    async def story() -> None:
        world = team.world
        for job in world.server.all(JOBS):
            world.edit_run(job, suspend=True)
        world.start_operator()
        await world.rest(2, succeed=False)
        # Of one second, so that names decide who is first: the first one that is resumed starts, the second is the last in line.
        for job in sorted(world.server.all(JOBS), key=lambda one: str(one["metadata"]["name"]), reverse=True):
            world.edit_run(job, suspend=False)
            if process := world.running_operator():
                process.deliver_all()
            await asyncio.sleep(0.01)
        await world.rest(3, succeed=False)

    # More than six writes of mere words within a minute are noticed by the world.
    team.live(story)
    (last,) = [job for job in team.world.server.all(JOBS) if job["metadata"]["name"] == "tune-8"]
    (ready,) = [one for one in last["status"]["conditions"] if one["type"] == "Ready"]
    assert ready["message"].endswith("Place in the line: about 40.")


@pytest.mark.parametrize("seed", range(6))
def test_limit_holds_while_requests_fail_and_the_operator_dies(seed: int) -> None:
    team = Team(12, f"bad weather {seed}", maxActiveJobs=2)
    rng = random.Random(f"claims {seed}")

    async def story() -> None:
        world = team.world
        world.weather.faults, world.weather.deaths, world.weather.latency = 0.2, 0.01, 0.3
        for _ in range(600):
            if world.operator is None or not world.operator.is_alive:
                world.start_operator()
            if rng.random() < 0.02 and world.server.get(CLAIMS, TEAM, "scratch") is not None:
                team.delete_claim("scratch")
            elif rng.random() < 0.1:
                world.restore_claims(TEAM)
            world.cluster_works()
            for job in world.batch_jobs_running():
                world.succeed(job)
            if (process := world.running_operator()) and rng.random() < 0.3:
                process.deliver_all()
            await asyncio.sleep(1.0)
        world.weather.faults = world.weather.deaths = 0.0
        world.restore_claims(TEAM)
        await world.rest(90, succeed=True)

    team.live(story)
    assert team.most_active == 2
    # Nobody holds a place for good that is not used.
    assert all(is_true(job, "Finished") or is_true(job, "Stalled") for job in team.world.server.all(JOBS))

"""Somebody deletes a job that a finalizer holds: nothing looks after what runs of it, so nothing of it runs."""

import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from finetune_operator.client.kinds import BATCH_JOBS, JOBS, PODS
from tests.simulation.api_server import Change, Document
from tests.simulation.controllers import condition_list, is_over
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest, role_of

FINALIZER = "example.com/archive"


class Cluster:
    """A gang that trains."""

    def __init__(self, **profile: Any) -> None:
        self.loop = VirtualLoop()
        self.world = World(self.loop, random.Random("deleted"))
        self.world.people_prepare([a_manifest(TEAM, "tune", nodes=2), a_manifest(TEAM, "next")], profile)
        self.created: list[str] = []
        self.world.server.watchers.append(self._saw)

    def _saw(self, change: Change) -> None:
        if change.by_operator and change.before is None and change.after is not None and change.kind == BATCH_JOBS:
            self.created.append(change.after["metadata"]["name"])

    async def train(self) -> None:
        self.world.start_operator()
        await self.world.rest(2, succeed=False)
        for job in self.world.batch_jobs_running():
            if role_of(job) == "preflight":
                self.world.succeed(job)
        await self.world.rest(2, succeed=False)
        assert len(self.training()) == 2

    def job(self) -> Document:
        found = self.world.server.get(JOBS, TEAM, "tune")
        assert found is not None
        return found

    def hold(self) -> None:
        self.world.server.update(JOBS, self.job(), lambda item: item["metadata"].update(finalizers=[FINALIZER]))

    def training(self) -> list[Document]:
        pods = [pod for pod in self.world.server.all(PODS) if pod["metadata"]["name"].startswith("tune-train-")]
        return [pod for pod in pods if not is_over(pod)]

    def live(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        run(story(), self.loop)


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_runs_of_a_deleted_job_is_stopped_and_nothing_is_made(policy: str, restarted: bool) -> None:
    cluster = Cluster()
    world = cluster.world

    async def story() -> None:
        await cluster.train()
        cluster.hold()
        if restarted and world.operator is not None:
            world.operator.kill()
        world.remove_job(cluster.job(), policy)
        cluster.created.clear()
        await world.rest(10, succeed=False)
        assert cluster.training() == []
        assert [name for name in cluster.created if name.startswith("tune-")] == []
        assert cluster.job()["status"]["phase"] == "Stopping"
        (finished,) = [one for one in condition_list(cluster.job()) if one["type"] == "Finished"]
        assert (finished["status"], finished["reason"]) == ("False", "Stopping")
        assert "finalizer" in finished["message"]
        calls = world.invariants.num_calls
        await world.rest(8, succeed=False, quiet=True)
        assert world.invariants.num_calls - calls < 60, "what is held is not looked at all the time"
        world.server.drop_finalizer(JOBS, cluster.job(), FINALIZER)
        await world.rest(2, succeed=False)
        assert world.server.get(JOBS, TEAM, "tune") is None

    cluster.live(story)


def test_what_is_orphaned_on_purpose_runs_on() -> None:
    cluster = Cluster()

    async def story() -> None:
        await cluster.train()
        cluster.world.remove_job(cluster.job(), "Orphan")
        # The garbage collector is late.
        await cluster.world.rest(1, succeed=False, quiet=True)
        await cluster.world.rest(3, succeed=False)
        assert cluster.world.server.get(JOBS, TEAM, "tune") is None
        assert len(cluster.training()) == 2

    cluster.live(story)


def test_deleted_job_that_waits_holds_up_nobody() -> None:
    cluster = Cluster(maxActiveJobs=1)
    world = cluster.world

    async def story() -> None:
        # Both are of one second, and this name comes first.
        blocker = a_manifest(TEAM, "a-first")
        world.manifests[TEAM, "a-first"] = blocker
        world.apply(TEAM, "a-first")
        job = world.server.get(JOBS, TEAM, "a-first")
        world.server.update(JOBS, job, lambda item: item["metadata"].update(finalizers=[FINALIZER]))
        job = world.server.get(JOBS, TEAM, "a-first")
        world.remove_job(job, "Background")
        world.start_operator()
        await world.rest(30, succeed=True)
        assert cluster.job()["status"]["phase"] == "Succeeded"

    cluster.live(story)

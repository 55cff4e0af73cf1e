"""A job is deleted and applied again at once, while what it leaves is still there: the new one waits, and takes nothing of it."""

import random

import pytest

from finetune_operator.client.kinds import BATCH_JOBS, CLAIMS, JOBS
from tests.simulation.api_server import Change, Document
from tests.simulation.controllers import is_true
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest
from tests.support.builders import a_job

CLAIM = "tune-workspace"
PROTECTION = "kubernetes.io/pvc-protection"


def templated(retain: str) -> Document:
    builder = a_job().spec("workspace", {"volumeClaimTemplate": {"storage": "10Gi"}, "retain": retain})
    builder.document["metadata"]["namespace"] = TEAM
    return builder.document


class Story:
    """The first job runs, is deleted in the background, and the second one is applied before anybody has done anything."""

    def __init__(self, manifest: Document) -> None:
        self.loop = VirtualLoop()
        self.world = World(self.loop, random.Random("namesakes"))
        self.world.people_prepare([manifest], {})
        self.stalls: set[str] = set()
        """Reasons for which the second job was ever stalled."""
        self.jobs_on_old_claim: list[str] = []
        """Jobs that were made for the second one while the claim was not its own."""
        self.world.server.watchers.append(self._saw)

    def _saw(self, change: Change) -> None:
        if self.world.num_lives == 0 or change.after is None:
            return
        if change.kind == JOBS and change.after["metadata"]["uid"] != self.first:
            conditions = (change.after.get("status") or {}).get("conditions") or ()
            self.stalls |= {one["reason"] for one in conditions if one["type"] == "Stalled" and one["status"] == "True"}
        if change.kind == BATCH_JOBS and change.before is None and self.second and _owners(change.after) == [self.second]:
            claim = self.claim()
            if claim is None or _owners(claim) == [self.first] or "deletionTimestamp" in claim["metadata"]:
                self.jobs_on_old_claim.append(change.after["metadata"]["name"])

    first = second = ""

    async def begin(self) -> None:
        (job,) = self.world.server.all(JOBS)
        self.first = job["metadata"]["uid"]
        self.world.start_operator()
        await self.world.rest(3, succeed=False)

    async def replace(self) -> None:
        (job,) = self.world.server.all(JOBS)
        self.world.remove_job(job, "Background")
        self.world.apply(TEAM, "tune")
        (job,) = self.world.server.all(JOBS)
        self.second = job["metadata"]["uid"]
        assert self.second != self.first
        # The garbage collector is late.
        await self.world.rest(1, succeed=False, quiet=True)

    def claim(self) -> Document | None:
        return self.world.server.get(CLAIMS, TEAM, CLAIM)

    def second_has_succeeded(self) -> bool:
        (job,) = self.world.server.all(JOBS)
        return job["metadata"]["uid"] == self.second and is_true(job, "Succeeded")


def _owners(item: Document) -> list[str]:
    return [owner["uid"] for owner in item["metadata"].get("ownerReferences") or ()]


@pytest.mark.parametrize("protected", [False, True])
def test_claim_that_goes_with_its_job_is_waited_for_and_made_again(protected: bool) -> None:
    story = Story(templated("Delete"))

    async def live() -> None:
        await story.begin()
        claim = story.claim()
        assert claim is not None
        if protected:
            story.world.server.update(CLAIMS, claim, lambda item: item["metadata"].update(finalizers=[PROTECTION]))
        await story.replace()
        if protected:
            # A pod still holds it: it is marked, and goes only when the pod does.
            story.world.cluster_works()
            await story.world.rest(2, succeed=False, quiet=True)
            claim = story.claim()
            assert "deletionTimestamp" in claim["metadata"]
            (job,) = story.world.server.all(JOBS)
            assert "startTime" not in (job.get("status") or {}), "nothing is frozen as long as the workspace is not there"
            story.world.server.drop_finalizer(CLAIMS, claim, PROTECTION)
        await story.world.rest(20, succeed=True)

    run(live(), story.loop)
    claim = story.claim()
    assert _owners(claim) == [story.second]
    assert story.second_has_succeeded()
    assert (story.stalls, story.jobs_on_old_claim) == (set(), [])


def test_claim_that_is_kept_is_taken_by_the_next_job_of_the_name() -> None:
    story = Story(templated("Keep"))

    async def live() -> None:
        await story.begin()
        kept = story.claim()
        await story.replace()
        await story.world.rest(20, succeed=True)
        assert kept is not None
        taken = story.claim()
        assert taken["metadata"]["uid"] == kept["metadata"]["uid"]

    run(live(), story.loop)
    assert story.second_has_succeeded()
    assert (story.stalls, story.jobs_on_old_claim) == (set(), [])


def test_what_the_garbage_collector_has_not_come_to_is_no_conflict() -> None:
    story = Story(a_manifest(TEAM, "tune", nodes=2))

    async def live() -> None:
        await story.begin()
        await story.replace()
        await story.world.rest(20, succeed=True)

    run(live(), story.loop)
    assert story.second_has_succeeded()
    assert story.stalls == set()

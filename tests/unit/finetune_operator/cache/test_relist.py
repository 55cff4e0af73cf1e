"""The first list, and what a relist repairs: ADDED, MODIFIED and DELETED events that never came."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from finetune_operator.cache.cache import Cache
from finetune_operator.cache.relist import relist
from finetune_operator.client.answers import ApiUnreachableError
from finetune_operator.client.api import Page
from finetune_operator.client.kinds import BATCH_JOBS, CACHED, JOBS, PODS, PROFILES, JobKey, Kind
from tests.unit.finetune_operator import objects
from tests.unit.finetune_operator.fakes import Clock, FakeApi

KEY = JobKey("team", "tune")


class Stage:
    def __init__(self, *namespaces: str) -> None:
        """After the first list."""
        self.api: Any = FakeApi()
        self.cache = Cache(Clock())
        self.api.put(JOBS, objects.finetune_job())
        self.api.put(BATCH_JOBS, objects.batch_job())
        self.api.put(PODS, objects.pod())
        self.relist(*namespaces)

    def relist(self, *namespaces: str) -> set[JobKey]:
        return asyncio.run(relist(self.api, self.cache, namespaces))


def test_first_list_knows_owners_before_children() -> None:
    stage = Stage()
    assert [held.key.name for held in stage.cache.pods_of("job-uid")] == ["tune-train-0-0"]
    assert [kind for verb, kind, _ in stage.api.calls if verb == "list"] == [kind.name for kind in CACHED]


def test_served_namespaces_are_listed_one_by_one_and_profiles_once() -> None:
    stage = Stage("team", "other")
    listed = [kind for verb, kind, _ in stage.api.calls if verb == "list"]
    assert (listed.count(PROFILES.name), listed.count(JOBS.name)) == (1, 2)


def test_relist_of_what_is_known_concerns_nobody() -> None:
    assert Stage().relist() == set()


def test_missed_creation_and_change_are_repaired() -> None:
    stage = Stage()
    stage.api.put(BATCH_JOBS, objects.batch_job(attempt=1))
    stage.api.put(PODS, objects.pod(status={"phase": "Failed"}))
    assert stage.relist() == {KEY}
    (held,) = stage.cache.pods_of("job-uid")
    assert held.pod.phase == "Failed"
    assert len(stage.cache.owned(BATCH_JOBS, "job-uid")) == 2


def test_missed_finetune_job_and_profile_are_repaired() -> None:
    stage = Stage()
    stage.api.put(JOBS, objects.finetune_job(profile="other"))
    stage.api.put(PROFILES, {"metadata": {"name": "other", "uid": "p"}, "spec": {"trainerImage": "image:1"}})
    assert stage.relist() == {KEY}
    held = stage.cache.job(KEY)
    assert held.document()["spec"]["profile"] == "other"
    assert stage.cache.profile("other") is not None


def test_missed_deletions_are_repaired() -> None:
    stage = Stage()
    del stage.api.objects["Pod", "team", "tune-train-0-0"]
    assert stage.relist() == {KEY}
    assert [held.is_gone for held in stage.cache.pods_of("job-uid")] == [True]
    stage.api.objects.clear()
    assert stage.relist() == {KEY}
    assert stage.cache.jobs() == []


def test_list_that_is_begun_again_forgets_its_first_pages() -> None:
    stage = Stage()
    pages = stage.api.pages

    async def expired_once(kind: Kind, namespace: str | None = None, **options: Any) -> AsyncIterator[Page]:
        if kind is PODS:
            [pod], version = await stage.api.list(kind, namespace, **options), str(next(stage.api._numbers))
            yield Page([pod], version, is_first=True)
            del stage.api.objects["Pod", "team", "tune-train-0-0"]
        async for page in pages(kind, namespace, **options):
            yield page

    stage.api.pages = expired_once
    assert stage.relist() == {KEY}
    assert [held.is_gone for held in stage.cache.pods_of("job-uid")] == [True]


def test_list_that_fails_is_reported_to_the_caller() -> None:
    stage = Stage()
    stage.api.fail["list"] = [ApiUnreachableError("reset")]
    with pytest.raises(ApiUnreachableError):
        stage.relist()
    assert stage.cache.job(KEY) is not None

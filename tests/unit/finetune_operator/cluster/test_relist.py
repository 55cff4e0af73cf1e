"""The first list, and what a relist repairs: ADDED, MODIFIED and DELETED events that never came."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from finetune_operator.cluster import relist as module
from finetune_operator.cluster.answers import ApiUnreachableError
from finetune_operator.cluster.api import Page
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.cluster.kinds import BATCH_JOBS, CONFIG_MAPS, JOBS, PODS, PROFILES, WATCHED, Kind
from finetune_operator.cluster.relist import fill, relist
from tests.unit.finetune_operator.cluster import objects
from tests.unit.finetune_operator.cluster.fakes import Clock, FakeApi

KEY = JobKey("team", "tune")


class Stage:
    def __init__(self) -> None:
        self.api: Any = FakeApi()
        self.cache = Cache(Clock())
        self.api.put(JOBS, objects.finetune_job())
        self.api.put(BATCH_JOBS, objects.batch_job())
        self.api.put(PODS, objects.pod())

    def fill(self, *namespaces: str) -> None:
        asyncio.run(fill(self.api, self.cache, namespaces))

    def relist(self, *namespaces: str) -> set[JobKey]:
        self.api.calls.clear()
        return asyncio.run(relist(self.api, self.cache, namespaces))

    def gets(self) -> list[str]:
        return [name for verb, _, name in self.api.calls if verb == "get"]


def test_first_list_knows_owners_before_children() -> None:
    stage = Stage()
    stage.fill()
    assert [held.key.name for held in stage.cache.pods_of("job-uid")] == ["tune-train-0-0"]
    assert [kind for verb, kind, _ in stage.api.calls if verb == "list"] == [kind.name for kind in WATCHED]


def test_served_namespaces_are_listed_one_by_one_and_profiles_once() -> None:
    stage = Stage()
    stage.fill("team", "other")
    listed = [kind for verb, kind, _ in stage.api.calls if verb == "list"]
    assert (listed.count(PROFILES.name), listed.count(JOBS.name)) == (1, 2)


def test_relist_of_what_is_known_reads_nothing_more() -> None:
    stage = Stage()
    stage.fill()
    assert stage.relist() == set()
    assert stage.gets() == []


def test_missed_creation_and_change_are_repaired() -> None:
    stage = Stage()
    stage.fill()
    stage.api.put(BATCH_JOBS, objects.batch_job(attempt=1))
    stage.api.put(PODS, objects.pod(status={"phase": "Failed"}))
    assert stage.relist() == {KEY}
    assert stage.gets() == ["tune-train-1", "tune-train-0-0"]
    (held,) = stage.cache.pods_of("job-uid")
    assert held.pod is not None
    assert held.pod.phase == "Failed"
    assert len(stage.cache.owned(BATCH_JOBS, "job-uid")) == 2


def test_missed_finetune_job_and_profile_are_repaired() -> None:
    stage = Stage()
    stage.fill()
    stage.api.put(JOBS, objects.finetune_job(profile="other"))
    stage.api.put(PROFILES, {"metadata": {"name": "other", "uid": "p"}, "spec": {"trainerImage": "image:1"}})
    assert stage.relist() == {KEY}
    held = stage.cache.job(KEY)
    assert held is not None
    assert held.document()["spec"]["profile"] == "other"
    assert stage.cache.profile("other") is not None


def test_missed_deletion_of_a_child_is_in_doubt_and_of_a_job_is_certain() -> None:
    stage = Stage()
    stage.fill()
    del stage.api.objects["Pod", "team", "tune-train-0-0"]
    assert stage.relist() == {KEY}
    assert [child.kind for child in stage.cache.to_look_up("job-uid")] == [PODS]
    stage.api.objects.clear()
    assert stage.relist() == {KEY}
    assert stage.cache.jobs() == []


def test_strangers_object_with_our_label_is_never_fetched() -> None:
    stage = Stage()
    stage.fill()
    stage.api.put(
        CONFIG_MAPS, {"metadata": {"name": "big", "namespace": "team", "uid": "s", "labels": objects.labels("train", 0)}}
    )
    assert stage.relist() == set()
    assert stage.gets() == []


def test_many_missed_objects_are_fetched_with_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SINGLE_READS", 3)
    stage = Stage()
    stage.fill()
    for attempt in range(1, 6):
        stage.api.put(BATCH_JOBS, objects.batch_job(attempt=attempt))
    assert stage.relist() == {KEY}
    assert stage.gets() == []
    assert len(stage.cache.owned(BATCH_JOBS, "job-uid")) == 6


def test_object_that_is_gone_before_it_is_read_is_passed_over() -> None:
    stage = Stage()
    stage.fill()
    stage.api.put(BATCH_JOBS, objects.batch_job(attempt=1))

    async def gone(*_: Any) -> None:
        return None

    stage.api.get = gone
    assert stage.relist() == set()


def test_list_that_is_begun_again_forgets_its_first_pages() -> None:
    stage = Stage()
    stage.fill()
    pages = stage.api.pages

    async def expired_once(kind: Kind, namespace: str | None = None, **options: Any) -> AsyncIterator[Page]:
        if kind is PODS:
            [pod], version = await stage.api.list(kind, namespace, **options)
            yield Page([pod], version, is_first=True)
            del stage.api.objects["Pod", "team", "tune-train-0-0"]
        async for page in pages(kind, namespace, **options):
            yield page

    stage.api.pages = expired_once
    assert stage.relist() == {KEY}
    assert [child.kind for child in stage.cache.to_look_up("job-uid")] == [PODS]


def test_list_that_fails_is_told_to_the_caller() -> None:
    stage = Stage()
    stage.fill()
    stage.api.fail["list"] = [ApiUnreachableError("reset")]
    with pytest.raises(ApiUnreachableError):
        stage.relist()
    assert stage.cache.job(KEY) is not None

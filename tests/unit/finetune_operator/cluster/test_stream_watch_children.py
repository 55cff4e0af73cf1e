"""The watches of children against a real HTTP server: from where they begin, what they tell, and what they survive."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from finetune_operator.cluster.api import Api
from finetune_operator.cluster.in_flight import RequestLimiter
from finetune_operator.cluster.kinds import BATCH_JOBS, CHILDREN, CONFIG_MAPS, JOBS, PODS, Kind
from finetune_operator.cluster.projection import CachedObject, project
from finetune_operator.cluster.stream_watch import ChildWatch, EventWatch
from tests.unit.finetune_operator.cluster.test_api import against

OWNER = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "name": "tune", "uid": "uid-tune", "controller": True}


def event(said: str, name: str, version: int) -> bytes:
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "ownerReferences": [OWNER],
    }
    return json.dumps({"type": said, "object": {"metadata": metadata, "data": {"plan": "{}"}}}).encode() + b"\n"


GONE = json.dumps({"type": "ERROR", "object": {"code": 410}}).encode() + b"\n"


class Stage:
    """A server of watches; `events` are told, once, to the next watch of a plural."""

    def __init__(self) -> None:
        self.events: dict[str, bytes] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.told: list[tuple[str, bool, str]] = []
        self.num_begun_anew = 0
        self._more = asyncio.Event()

    def watch(self, api: Api, *namespaces: str) -> ChildWatch:
        async def sleep(_: float) -> None:
            await asyncio.sleep(0.01)

        return ChildWatch(api, namespaces, self._read, self._take, begun_anew=self._begun_anew, sleep=sleep)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds after something was asked or told."""
        async with asyncio.timeout(30):
            while not condition():
                self._more.clear()
                await self._more.wait()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, dict(request.query)))
        self._more.set()
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        plural = request.path.rpartition("/")[2]
        if plural in self.events:
            await response.write(self.events.pop(plural))
        else:
            await asyncio.Event().wait()
        return response

    def versions(self, kind: Kind) -> list[str]:
        return [query.get("resourceVersion", "") for path, query in self.asked if path.endswith(f"/{kind.plural}")]

    def _begun_anew(self) -> None:
        self.num_begun_anew += 1

    def _read(self, kind: Kind, document: Any) -> CachedObject | None:
        held = project(kind, document)
        return None if held.key.name == "strange" else held

    def _take(self, kind: Kind, deleted: bool, held: CachedObject) -> None:
        self.told.append((kind.plural, deleted, held.key.name))
        self._more.set()


def test_watch_begins_after_the_list_and_tells_what_is_ours() -> None:
    stage = Stage()
    stage.events["configmaps"] = event("ADDED", "one", 8) + event("ADDED", "strange", 9) + event("DELETED", "one", 10)

    async def scenario(api: Api, _: list[float]) -> None:
        children = stage.watch(api, "team")
        children.begin_from(CONFIG_MAPS, "team", "7")
        children.begin_from(JOBS, "team", "6")
        running = asyncio.create_task(children.run())
        await stage.until(lambda: len(stage.versions(CONFIG_MAPS)) == 2)
        running.cancel()

    against(stage.answer, scenario)
    assert stage.told == [("configmaps", False, "one"), ("configmaps", True, "one")]
    assert stage.versions(CONFIG_MAPS) == ["7", "10"]
    assert stage.versions(PODS) == [""]
    assert stage.versions(JOBS) == []
    assert {path for path, _ in stage.asked} == {
        "/apis/batch/v1/namespaces/team/jobs",
        "/api/v1/namespaces/team/pods",
        "/api/v1/namespaces/team/configmaps",
        "/api/v1/namespaces/team/services",
    }
    assert {query["labelSelector"] for _, query in stage.asked} == {"app.kubernetes.io/managed-by=finetune-operator"}
    assert stage.num_begun_anew == 0


def test_expired_watch_begins_with_all_objects_and_says_that_deletions_may_be_missed() -> None:
    stage = Stage()
    stage.events["configmaps"] = event("ADDED", "one", 8) + GONE

    async def scenario(api: Api, _: list[float]) -> None:
        children = stage.watch(api)
        children.begin_from(CONFIG_MAPS, None, "7")
        running = asyncio.create_task(children.run())
        await stage.until(lambda: len(stage.versions(CONFIG_MAPS)) == 2)
        running.cancel()

    against(stage.answer, scenario)
    assert stage.versions(CONFIG_MAPS) == ["7", ""]
    assert stage.num_begun_anew == 1


def test_age_of_a_kind_starts_again_with_each_event() -> None:
    stage = Stage()
    stage.events["jobs"] = event("MODIFIED", "strange", 8)

    async def scenario(api: Api, _: list[float]) -> None:
        children = stage.watch(api)
        children._heard = dict.fromkeys(children.ages(), -1e9)
        assert set(children.ages()) == {kind.name for kind in CHILDREN}
        running = asyncio.create_task(children.run())
        await stage.until(lambda: len(stage.versions(BATCH_JOBS)) == 2)
        running.cancel()
        assert [name for name, seconds in children.ages().items() if seconds < 60] == ["Job"]

    against(stage.answer, scenario)


def test_requests_are_answered_however_many_namespaces_are_watched() -> None:
    stage = Stage()
    namespaces = [f"team-{number}" for number in range(60)]

    async def scenario(api: Api, _: list[float]) -> None:
        watches = [stage.watch(api, *namespaces), EventWatch(api, tuple(namespaces), lambda _: None)]
        running = [asyncio.create_task(one.run()) for one in watches]
        await stage.until(lambda: len(stage.asked) == 5 * len(namespaces))
        async with asyncio.timeout(20):
            assert await api.list(JOBS) == ([], "1")
        for task in running:
            task.cancel()

    against(stage.answer, scenario, in_flight=RequestLimiter(), fence=lambda: None)

"""kopf's watches against an HTTP server that answers as an API server does, and misbehaves as one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from finetune_operator import watch
from finetune_operator.cluster.kinds import JOBS, PODS, WRITTEN_BY_USERS, Kind
from finetune_operator.cluster.projection import CachedObject, project
from finetune_operator.watch import SILENCE_SECONDS, ErrorBackoffs, WatchedPaths, Watches
from tests.unit.finetune_operator.cluster.fakes import Clock

Document = dict[str, Any]
DEADLINE = 25.0
TEAM = "team"
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
"""kopf looks for it before anything else."""


class WatchedServer:
    """Serves discovery, lists and watches of the namespace `team`."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Document]] = {}
        """By plural: what lists answer."""
        self.events: dict[str, list[Document]] = {}
        """By plural: told, once, to the next watch."""
        self.refusals = 0
        """So many lists are answered with 503 first."""
        self.served = {kind.plural for kind in (*WRITTEN_BY_USERS, NAMESPACES)}
        self.lists: list[str] = []

    @asynccontextmanager
    async def running(self, kubeconfig: Path) -> AsyncIterator[None]:
        """Serve, and write a kubeconfig that leads here."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"
        write_kubeconfig(kubeconfig, server)
        try:
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        if request.path == "/api":
            return web.json_response({"versions": ["v1"]})
        if request.path == "/apis":
            return web.json_response(
                {"groups": [_group(group) for group in sorted({kind.group for kind in WRITTEN_BY_USERS} - {""})]}
            )
        plural = request.path.rpartition("/")[2]
        if plural == "v1" or plural == "v1alpha1":
            return web.json_response({"resources": [self._resource(kind) for kind in self._kinds(request.path)]})
        if "watch" in request.query:
            return await self._watch(request, plural)
        self.lists.append(plural)
        if self.refusals:
            self.refusals -= 1
            return web.json_response({"reason": "ServiceUnavailable"}, status=503)
        return web.json_response({"metadata": {"resourceVersion": "5"}, "items": self.objects.get(plural, [])})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events.pop(plural, []):
            await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.Event().wait()
        return response

    def _kinds(self, root: str) -> list[Kind]:
        return [kind for kind in (*WRITTEN_BY_USERS, NAMESPACES) if kind.root == root and kind.plural in self.served]

    def _resource(self, kind: Kind) -> Document:
        verbs = ["get", "list", "watch"]
        return {"name": kind.plural, "singularName": "", "namespaced": kind.namespaced, "kind": kind.name, "verbs": verbs}


def write_kubeconfig(path: Path, server: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": server}}],
        "users": [{"name": "it", "user": {"token": "secret"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    }
    path.write_text(json.dumps(config))


def _group(name: str) -> Document:
    (version,) = {kind.version for kind in WRITTEN_BY_USERS if kind.group == name}
    return {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}


def a_job(name: str) -> Document:
    metadata = {"name": name, "namespace": TEAM, "uid": f"uid-{name}", "resourceVersion": "3"}
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata, "spec": {}}


class Sink:
    """What was told, as (plural, deleted, name)."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool, str]] = []
        self._more = asyncio.Event()

    def __call__(self, kind: Kind, deleted: bool, held: CachedObject) -> None:
        self.told.append((kind.plural, deleted, held.key.name))
        self._more.set()

    async def wait_for(self, *expected: tuple[str, bool, str]) -> None:
        """Wait until all of these were told."""
        async with asyncio.timeout(DEADLINE):
            while not set(expected) <= set(self.told):
                self._more.clear()
                await self._more.wait()


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr(watch, "RESTART_FIRST", 0.05)
    return path


def test_listed_and_watched_objects_reach_the_main_loop(kubeconfig: Path) -> None:
    async def scenario() -> None:
        server, sink = WatchedServer(), Sink()
        server.objects["finetunejobs"] = [a_job("listed")]
        server.events["finetunejobs"] = [
            {"type": "ADDED", "object": a_job("added")},
            {"type": "DELETED", "object": a_job("deleted")},
        ]
        async with server.running(kubeconfig):
            watches = Watches((TEAM,), project, sink)
            watches.start()
            listed, added, deleted = (
                ("finetunejobs", False, "listed"),
                ("finetunejobs", False, "added"),
                ("finetunejobs", True, "deleted"),
            )
            await sink.wait_for(listed, added, deleted)
            await watches.stop()
        assert watches.ended.is_set()
        assert not watches.restarted.is_set()

    asyncio.run(scenario())


@pytest.mark.parametrize("code", [500, 504])
def test_error_event_starts_the_watches_again(kubeconfig: Path, code: int) -> None:
    async def scenario() -> None:
        server, sink = WatchedServer(), Sink()
        server.events["finetunejobs"] = [{"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "etcd is away"}}]
        async with server.running(kubeconfig):
            watches = Watches((TEAM,), project, sink)
            watches.start()
            async with asyncio.timeout(DEADLINE):
                await watches.restarted.wait()
            server.events["finetunejobs"] = [{"type": "ADDED", "object": a_job("after")}]
            await sink.wait_for(("finetunejobs", False, "after"))
            assert not watches.ended.is_set()
            await watches.stop()
        assert watches.num_restarts == 1

    asyncio.run(scenario())


def test_expired_watch_lists_again_without_a_restart(kubeconfig: Path) -> None:
    async def scenario() -> None:
        server, sink = WatchedServer(), Sink()
        server.events["finetunejobs"] = [{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}]
        async with server.running(kubeconfig):
            watches = Watches((TEAM,), project, sink)
            watches.start()
            server.objects["finetunejobs"] = [a_job("listed")]
            await sink.wait_for(("finetunejobs", False, "listed"))
            await watches.stop()
        assert watches.num_restarts == 0

    asyncio.run(scenario())


def test_server_that_is_away_for_longer_than_kopfs_own_patience_ends_nothing(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ErrorBackoffs, "__iter__", lambda _: iter([0.001] * 40))

    async def scenario() -> None:
        server, sink = WatchedServer(), Sink()
        server.refusals = 60
        server.objects["finetuneprofiles"] = []
        server.objects["finetunejobs"] = [a_job("listed")]
        async with server.running(kubeconfig):
            watches = Watches((TEAM,), project, sink)
            watches.start()
            await sink.wait_for(("finetunejobs", False, "listed"))
            await watches.stop()
        assert watches.num_restarts == 0

    asyncio.run(scenario())


def test_kind_that_is_not_served_when_kopf_looks_is_watched_once_it_is(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 0.5)

    async def scenario() -> None:
        server, sink = WatchedServer(), Sink()
        server.served.remove(JOBS.plural)
        server.objects["finetunejobs"] = [a_job("listed")]
        async with server.running(kubeconfig):
            watches = Watches((TEAM,), project, sink)
            watches.start()
            async with asyncio.timeout(DEADLINE):
                await watches.restarted.wait()
            assert JOBS.plural not in server.lists
            server.served.add(JOBS.plural)
            monkeypatch.setattr(watch, "SILENCE_SECONDS", 60.0)
            await sink.wait_for(("finetunejobs", False, "listed"))
            await watches.stop()

    asyncio.run(scenario())


def test_stop_before_the_start_of_kopf_ends_the_thread(kubeconfig: Path) -> None:
    async def scenario() -> None:
        watches = Watches((TEAM,), project, Sink())
        stopping = asyncio.create_task(watches.stop())
        watches.start()
        async with asyncio.timeout(DEADLINE):
            await stopping
            await watches.ended.wait()

    asyncio.run(scenario())


def test_backoffs_of_requests_have_no_end_and_a_bound() -> None:
    pauses = iter(ErrorBackoffs())
    assert [next(pauses) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_watches_are_told_apart_by_path_whatever_the_servers_own_path_is() -> None:
    clock = Clock()
    answers = WatchedPaths({JOBS.path("team"), PODS.path("team")}, clock)
    root = URL("https://rancher.test/k8s/clusters/c-1")
    answers.note(URL(f"{root}{PODS.path('team')}?watch=true"), 403)
    answers.note(URL(f"{root}{PODS.path('other')}?watch=true"), 200)
    answers.note(URL(f"{root}{PODS.path('team')}?limit=500"), 200)
    assert answers.missing == {"/api/v1/namespaces/team/pods", "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs"}
    answers.note(URL(f"{root}{PODS.path('team')}?watch=true"), 200)
    assert answers.missing == {"/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs"}


def test_answered_lists_put_off_the_verdict_that_something_is_not_watched() -> None:
    clock = Clock()
    answers = WatchedPaths({JOBS.path("team")}, clock)
    clock.advance(SILENCE_SECONDS - 1)
    assert answers.seconds_left == 1
    answers.note(URL(f"http://it{JOBS.path('team')}?limit=500&continue=x"), 200)
    assert answers.seconds_left == SILENCE_SECONDS
    clock.advance(5)
    answers.note(URL(f"http://it{JOBS.path('team')}?limit=500"), 503)
    answers.note(URL("http://it/apis"), 200)
    assert answers.seconds_left == SILENCE_SECONDS - 5

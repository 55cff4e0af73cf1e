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

from finetune_operator.cache import kopf_watch as watch
from finetune_operator.cache.kopf_watch import ErrorBackoffs, WatchedPaths, Watches
from finetune_operator.client.kinds import JOBS, PODS, WATCHED, Kind

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
        self.forbidden: set[str] = set()
        """Plurals that may not be listed."""
        self.refusals = 0
        """So many lists are answered with 503 first."""
        self.served = {kind.plural for kind in (*WATCHED, NAMESPACES)}
        self.lists: list[str] = []
        self.queries: dict[str, list[dict[str, str]]] = {}
        """By path: what lists and watches asked for."""

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
            return web.json_response({"groups": [_group(group) for group in sorted({kind.group for kind in WATCHED} - {""})]})
        plural = request.path.rpartition("/")[2]
        if plural == "v1" or plural == "v1alpha1":
            return web.json_response({"resources": [self._resource(kind) for kind in self._kinds(request.path)]})
        self.queries.setdefault(request.path, []).append(dict(request.query))
        if "watch" in request.query:
            return await self._watch(request, plural)
        self.lists.append(plural)
        if plural in self.forbidden:
            return web.json_response({"reason": "Forbidden"}, status=403)
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
        return [kind for kind in (*WATCHED, NAMESPACES) if kind.root == root and kind.plural in self.served]

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
    (version,) = {kind.version for kind in WATCHED if kind.group == name}
    return {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}


def an_object(name: str) -> Document:
    """A job by its fields; the watches look at none of them."""
    metadata = {"name": name, "namespace": TEAM, "uid": f"uid-{name}", "resourceVersion": "3"}
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata, "spec": {}}


class Sink:
    """What was told, as (plural, deleted, name)."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool, str]] = []
        self._more = asyncio.Event()

    def __call__(self, kind: Kind, deleted: bool, document: Document) -> None:
        self.told.append((kind.plural, deleted, document["metadata"]["name"]))
        self._more.set()

    async def wait_for(self, *expected: tuple[str, bool, str]) -> None:
        """Wait until all of these were told."""
        while not set(expected) <= set(self.told):
            self._more.clear()
            await self._more.wait()


@asynccontextmanager
async def watching(server: WatchedServer, sink: Sink, kubeconfig: Path) -> AsyncIterator[Watches]:
    """The watches of the namespace while the server runs, with an end to what a test waits for."""
    async with server.running(kubeconfig), asyncio.timeout(DEADLINE):
        watches = Watches((TEAM,), sink)
        watches.start()
        yield watches
        await watches.stop()


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr(watch, "RESTART_FIRST", 0.05)
    return path


async def test_listed_and_watched_objects_reach_the_main_loop(kubeconfig: Path) -> None:
    server, sink = WatchedServer(), Sink()
    server.objects["finetunejobs"] = [an_object("listed")]
    server.events["finetunejobs"] = [
        {"type": "ADDED", "object": an_object("added")},
        {"type": "DELETED", "object": an_object("deleted")},
    ]
    async with watching(server, sink, kubeconfig) as watches:
        listed, added, deleted = (
            ("finetunejobs", False, "listed"),
            ("finetunejobs", False, "added"),
            ("finetunejobs", True, "deleted"),
        )
        await sink.wait_for(listed, added, deleted)
    assert watches.ended.is_set()
    assert not watches.restarted.is_set()


@pytest.mark.parametrize("code", [500, 504])
async def test_error_event_starts_the_watches_again(kubeconfig: Path, code: int) -> None:
    server, sink = WatchedServer(), Sink()
    server.events["finetunejobs"] = [{"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "etcd is away"}}]
    async with watching(server, sink, kubeconfig) as watches:
        await watches.restarted.wait()
        server.events["finetunejobs"] = [{"type": "ADDED", "object": an_object("after")}]
        await sink.wait_for(("finetunejobs", False, "after"))
        assert not watches.ended.is_set()
    assert watches.num_restarts == 1


async def test_expired_watch_lists_again_without_a_restart_and_says_that_deletions_may_be_missed(kubeconfig: Path) -> None:
    server, sink = WatchedServer(), Sink()
    server.events["pods"] = [{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}]
    async with watching(server, sink, kubeconfig) as watches:
        server.objects["pods"] = [an_object("listed")]
        await sink.wait_for(("pods", False, "listed"))
        await watches.restarted.wait()
    assert watches.num_restarts == 0
    assert server.lists.count("pods") == 2


async def test_server_that_is_away_for_longer_than_kopfs_own_patience_ends_nothing(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ErrorBackoffs, "__iter__", lambda _: iter([0.001] * 40))
    server, sink = WatchedServer(), Sink()
    server.refusals = 60
    server.objects["finetuneprofiles"] = []
    server.objects["finetunejobs"] = [an_object("listed")]
    async with watching(server, sink, kubeconfig) as watches:
        await sink.wait_for(("finetunejobs", False, "listed"))
    assert watches.num_restarts == 0


async def test_kind_that_is_not_served_at_first_is_watched_once_it_is(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 0.5)
    server, sink = WatchedServer(), Sink()
    server.served.remove(JOBS.plural)
    server.objects["finetunejobs"] = [an_object("listed")]
    async with watching(server, sink, kubeconfig) as watches:
        await watches.restarted.wait()
        assert JOBS.plural not in server.lists
        server.served.add(JOBS.plural)
        monkeypatch.setattr(watch, "SILENCE_SECONDS", 60.0)
        await sink.wait_for(("finetunejobs", False, "listed"))


async def test_stop_before_the_start_of_kopf_ends_the_thread(kubeconfig: Path) -> None:
    watches = Watches((TEAM,), Sink())
    stopping = asyncio.create_task(watches.stop())
    watches.start()
    async with asyncio.timeout(DEADLINE):
        await stopping
        await watches.ended.wait()


def test_backoffs_of_requests_have_no_end_and_a_bound() -> None:
    pauses = iter(ErrorBackoffs())
    assert [next(pauses) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


async def test_each_kind_is_listed_and_watched_by_its_selector_and_nothing_else_is_asked_for(kubeconfig: Path) -> None:
    server, sink = WatchedServer(), Sink()
    for kind in WATCHED:
        server.events[kind.plural] = [{"type": "ADDED", "object": an_object(f"a-{kind.plural}")}]
    async with watching(server, sink, kubeconfig):
        await sink.wait_for(*((kind.plural, False, f"a-{kind.plural}") for kind in WATCHED))
    children, warnings, everything = (
        {"labelSelector": "app.kubernetes.io/managed-by=finetune-operator"},
        {"fieldSelector": "type=Warning"},
        dict[str, str](),
    )
    expected = {
        "/apis/finetune.dev/v1alpha1/finetuneprofiles": everything,
        "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs": everything,
        "/apis/batch/v1/namespaces/team/jobs": children,
        "/api/v1/namespaces/team/pods": children,
        "/api/v1/namespaces/team/configmaps": children,
        "/api/v1/namespaces/team/services": children,
        "/api/v1/namespaces/team/events": warnings,
    }
    assert server.queries == {
        path: [{"limit": "100"} | selector, {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "5"} | selector]
        for path, selector in expected.items()
    }


async def test_right_that_is_missing_for_one_kind_stops_no_other_watch(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 0.5)
    server, sink = WatchedServer(), Sink()
    server.forbidden = {"events"}
    async with watching(server, sink, kubeconfig) as watches:
        while server.lists.count("events") < 3:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.05)
        assert watches.num_restarts == 0
        server.forbidden = set()
        server.objects["events"] = [an_object("warning")]
        await sink.wait_for(("events", False, "warning"))
    assert watches.num_restarts == 0


def test_watches_are_distinguished_by_path_whatever_the_servers_own_path_is() -> None:
    paths = WatchedPaths({JOBS.path("team"), PODS.path("team")}, lambda: None)
    root = URL("https://rancher.test/k8s/clusters/c-1")
    paths.note(URL(f"{root}{PODS.path('other')}?watch=true"), 200)
    paths.note(URL(f"{root}/apis"), 200)
    assert paths.missing == {"/api/v1/namespaces/team/pods", "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs"}
    paths.note(URL(f"{root}{PODS.path('team')}?limit=100"), 403)
    assert paths.missing == {"/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs"}


@pytest.mark.parametrize(
    ("requests", "is_anew"),
    [
        ([("limit=100", 200), ("limit=100&continue=a", 200), ("watch=true", 200), ("watch=true&resourceVersion=7", 200)], False),
        ([("limit=100", 503), ("limit=100", 403), ("limit=100", 200), ("watch=true", 200)], False),
        ([("limit=100", 200), ("watch=true", 200), ("limit=100", 503)], False),
        ([("limit=100", 200), ("watch=true", 200), ("limit=100", 200)], True),
    ],
)
def test_second_list_of_a_path_is_a_watch_that_was_restarted(requests: list[tuple[str, int]], is_anew: bool) -> None:
    anew: list[bool] = []
    paths = WatchedPaths({JOBS.path("team"), PODS.path("team")}, lambda: anew.append(True))
    paths.note(URL(f"http://it{JOBS.path('team')}?limit=100"), 200)
    for query, status in requests:
        paths.note(URL(f"http://it{PODS.path('team')}?{query}"), status)
    assert bool(anew) == is_anew

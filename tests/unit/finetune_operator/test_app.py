"""The operator as a whole, from start to SIGTERM, against an HTTP server that answers as an API server without jobs does."""

import asyncio
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from finetune_operator import app
from finetune_operator.app import run
from finetune_operator.client.kinds import CACHED
from finetune_operator.metrics.health import HttpServer
from finetune_operator.settings import Settings, Timeouts
from tests.unit.finetune_operator.cache.test_kopf_watch import TEAM, WatchedServer, an_object

Document = dict[str, Any]
DEADLINE = 60.0
LISTED = {kind.plural for kind in CACHED}
CLOCKWORK = replace(Timeouts(), crd_poll=0.01, lease_retry=0.05, first_relist=0.05, relist=0.05, drain=1.0)


class EmptyCluster(WatchedServer):
    """Nothing but Leases."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: dict[str, Document] = {}
        self.own_lists = 0
        """Lists of the operator, without kopf's."""
        self.fail_relists = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if "/leases" in request.path:
            return await self._lease(request)
        if request.headers["User-Agent"] == "finetune-operator" and request.path.rpartition("/")[2] in LISTED:
            self.own_lists += 1
            if self.own_lists > len(LISTED) and self.fail_relists:
                self.fail_relists -= 1
                return web.Response(text="[]", content_type="application/json")
        return await super()._answer(request)

    async def _lease(self, request: web.Request) -> web.Response:
        name = request.path.rpartition("/leases")[2].strip("/")
        if request.method == "GET":
            lease = self.leases.get(name)
            return web.json_response(lease) if lease else web.json_response({"reason": "NotFound"}, status=404)
        written: Document = await request.json()
        number = int(written["metadata"].get("resourceVersion", "0")) + 1
        self.leases[written["metadata"]["name"]] = written | {"metadata": written["metadata"] | {"resourceVersion": str(number)}}
        return web.json_response(self.leases[written["metadata"]["name"]])

    def holder(self, name: str) -> str:
        """Who holds a Lease."""
        return str(self.leases[name]["spec"]["holderIdentity"])


class Operator:
    """What the test sees of the operator that runs in its own loop."""

    def __init__(self, task: asyncio.Task[int], server: HttpServer) -> None:
        self.task, self._server = task, server

    async def wait_for(self, path: str, status: int, text: str = "") -> None:
        """Until an endpoint answers so."""
        async with asyncio.timeout(DEADLINE):
            while not self.task.done():
                found = await asyncio.to_thread(self._fetch, path)
                if found[0] == status and text in found[1]:
                    return
                await asyncio.sleep(0.02)
        raise AssertionError(f"the operator ended with {self.task.result()}")

    def _fetch(self, path: str) -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._server.address[1]}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read().decode()


def against(
    cluster: EmptyCluster, scenario: Callable[[Operator], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Run the operator next to a scenario, then end it with SIGTERM. Returns its exit code."""
    kubeconfig = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    servers: list[HttpServer] = []

    def remembered(*arguments: Any, **named: Any) -> HttpServer:
        servers.append(make(*arguments, **named))
        return servers[-1]

    make = app.health_server
    monkeypatch.setattr(app, "health_server", remembered)
    settings = Settings(
        namespaces=(TEAM,),
        lease_namespace="system",
        lease_name="release",
        identity="me",
        listen_address="127.0.0.1",
        listen_port=0,
        log_level="info",
    )

    async def both() -> int:
        async with cluster.running(kubeconfig):
            task = asyncio.create_task(run(settings, CLOCKWORK))
            async with asyncio.timeout(DEADLINE):
                while not servers:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0)
            try:
                await scenario(Operator(task, servers[0]))
            finally:
                if not task.done():
                    os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(DEADLINE):
                return await task

    return asyncio.run(both())


def test_starts_on_an_empty_cluster_survives_relists_of_nothing_and_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = EmptyCluster()
    kept: list[int] = []
    monkeypatch.setattr(app, "freeze_objects", lambda: kept.append(cluster.own_lists))

    async def scenario(operator: Operator) -> None:
        await operator.wait_for("/metrics", 200, "finetune_leading 1.0")
        await operator.wait_for("/readyz", 200)
        assert cluster.holder("release") == "me"
        async with asyncio.timeout(DEADLINE):
            while cluster.own_lists < 3 * len(LISTED):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        assert not operator.task.done()

    assert against(cluster, scenario, tmp_path, monkeypatch) == 0
    assert kept == [len(LISTED)], "once, before the first relist"
    assert cluster.holder("release") == ""


def test_relist_that_fails_for_whatever_reason_is_counted_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune_operator.side_tasks.background.PAUSE_SECONDS", 0.01)
    cluster = EmptyCluster()
    cluster.fail_relists = 3

    async def scenario(operator: Operator) -> None:
        await operator.wait_for("/metrics", 200, 'finetune_background_failures_total{task="relist"} 3.0')
        await operator.wait_for("/readyz", 200)
        assert not operator.task.done()

    assert against(cluster, scenario, tmp_path, monkeypatch) == 0


def test_first_list_that_is_refused_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune_operator.side_tasks.background.PAUSE_SECONDS", 0.01)
    cluster = EmptyCluster()
    cluster.refusals = 4

    async def scenario(operator: Operator) -> None:
        await operator.wait_for("/readyz", 200)
        await operator.wait_for("/metrics", 200, 'finetune_background_failures_total{task="first list"}')

    assert against(cluster, scenario, tmp_path, monkeypatch) == 0


def test_warnings_are_taken_until_they_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = EmptyCluster()
    told: list[str] = []
    monkeypatch.setattr("finetune_operator.app.WarningEvents.take", lambda _, event: told.append(event["metadata"]["name"]))
    cluster.objects["events"] = [an_object("listed")]
    cluster.events["events"] = [
        {"type": "DELETED", "object": an_object("expired")},
        {"type": "ADDED", "object": an_object("added")},
    ]

    async def scenario(operator: Operator) -> None:
        await operator.wait_for("/readyz", 200)
        async with asyncio.timeout(DEADLINE):
            while "added" not in told:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)

    assert against(cluster, scenario, tmp_path, monkeypatch) == 0
    assert told == ["listed", "added"]


def test_waits_for_its_kinds_and_ends_in_order_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = EmptyCluster()
    cluster.served.remove("finetunejobs")

    async def scenario(operator: Operator) -> None:
        await operator.wait_for("/readyz", 503, "waiting for the CustomResourceDefinitions")
        await operator.wait_for("/healthz", 200)
        assert not cluster.leases

    assert against(cluster, scenario, tmp_path, monkeypatch) == 0


def test_a_standby_is_ready_and_leads_once_the_lease_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = EmptyCluster()
    held = {"holderIdentity": "another", "leaseDurationSeconds": 60, "renewTime": "t"}
    cluster.leases["release"] = {"metadata": {"name": "release", "resourceVersion": "1"}, "spec": held}

    async def scenario(operator: Operator) -> None:
        await operator.wait_for("/readyz", 200)
        assert cluster.holder("release") == "another"
        held["holderIdentity"] = ""
        await operator.wait_for("/metrics", 200, "finetune_leading 1.0")
        await operator.wait_for("/readyz", 200)

    assert against(cluster, scenario, tmp_path, monkeypatch) == 0

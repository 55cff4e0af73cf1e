"""No write leaves once another replica may hold the lease: a client whose fence closes, and a real process that is stopped."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from finetune_operator.client.answers import ApiUnreachableError, NotLeadingError
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import CONFIG_MAPS
from finetune_operator.leader.lease import Elector, LeaseObject
from tests.unit.finetune_operator import fenced_writer

Document = dict[str, Any]
DEADLINE = 60.0
BURST = 500
"""Writes after which the server is busy."""


class ServerOfOneLease:
    """An API server with one Lease, that counts all other writes. `answers`: instead of 201, in this order."""

    def __init__(self) -> None:
        self.lease: Document | None = None
        self.writes = 0
        self.answers: list[web.Response] = []
        self.is_busy = asyncio.Event()
        self._version = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its address."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if "/leases" not in request.path:
            self.writes += 1
            if self.writes == BURST:
                self.is_busy.set()
            return self.answers.pop(0) if self.answers else web.json_response({}, status=201)
        if request.method == "GET":
            return web.json_response(self.lease) if self.lease else web.json_response({"reason": "NotFound"}, status=404)
        written: Document = await request.json()
        version = "" if self.lease is None else self.lease["metadata"]["resourceVersion"]
        if written["metadata"].get("resourceVersion", "") != version:
            return web.json_response({"reason": "Conflict"}, status=409)
        self._version += 1
        self.lease = written | {"metadata": written["metadata"] | {"resourceVersion": str(self._version)}}
        return web.json_response(self.lease)


class Gate:
    """A fence that lets so many looks through."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self) -> None:
        if self.looks <= 0:
            raise NotLeadingError("closed")
        self.looks -= 1


async def test_closed_fence_sends_nothing() -> None:
    server = ServerOfOneLease()
    async with server.running() as address:
        api = Api(Configuration(host=address), fence=Gate(0))
        with pytest.raises(NotLeadingError):
            await api.create(CONFIG_MAPS, "team", {})
        with pytest.raises(NotLeadingError):
            await api.get(CONFIG_MAPS, "team", "name")
        await api.close()
    assert server.writes == 0


async def test_fence_that_closes_while_the_server_said_later_stops_the_next_attempt() -> None:
    server = ServerOfOneLease()
    server.answers = [web.json_response({}, status=429, headers={"Retry-After": "1"})]
    gate = Gate(1000)

    async def sleep(_: float) -> None:
        gate.looks = 0

    async with server.running() as address:
        api = Api(Configuration(host=address), fence=gate, sleep=sleep)
        with pytest.raises(NotLeadingError):
            await api.create(CONFIG_MAPS, "team", {})
        await api.close()
    assert server.writes == 1


async def test_fence_that_closes_between_the_look_and_the_bytes_sends_nothing() -> None:
    server = ServerOfOneLease()
    async with server.running() as address:
        api = Api(Configuration(host=address), fence=Gate(1))
        with pytest.raises(ApiUnreachableError, match="closed"):
            await api.create(CONFIG_MAPS, "team", {})
        await api.close()
    assert server.writes == 0


async def test_stopped_leader_begins_no_write_when_it_continues() -> None:
    """Stopped in the middle of a burst until another holds the lease. CLOCK_MONOTONIC continues meanwhile, or this would fail."""
    server = ServerOfOneLease()
    async with server.running() as address:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", fenced_writer.__name__, address)
        try:
            async with asyncio.timeout(DEADLINE):
                await server.is_busy.wait()
            os.kill(process.pid, signal.SIGSTOP)
            api = Api(Configuration(host=address))
            standby = Elector(LeaseObject(api, "system", "release"), "standby", fenced_writer.TIMING)
            async with asyncio.timeout(DEADLINE):
                await standby.acquire()
            await api.close()
            before = server.writes
            os.kill(process.pid, signal.SIGCONT)
            async with asyncio.timeout(DEADLINE):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        # At most the one whose system call the only sending thread had begun when it was stopped after its last look.
        assert server.writes - before <= 1
        assert server.lease["spec"]["holderIdentity"] == "standby"

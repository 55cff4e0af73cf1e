"""A plain HTTP server before an API server's TLS, that kills and breaks as it is told, write by write.

It runs in a thread and event loop of its own. Requests carry the operator's own token; nothing of them is changed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from yarl import URL

Document = dict[str, Any]
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "content-encoding", "host", "date", "accept-encoding"}


class Fault(StrEnum):
    """What happens to one request."""

    KILL_BEFORE = "killed before the write"
    KILL_AFTER = "killed after the write"
    TOO_MANY = "429 with Retry-After"
    ERROR = "500"
    RESET_BEFORE = "connection reset before"
    RESET_AFTER = "connection reset after the commit"
    STALL = "stall"
    STALE = "stale list"
    WATCH_GONE = "watch: 410"
    WATCH_ERROR = "watch: ERROR 500"
    WATCH_CUT = "watch: cut off"


@dataclass(frozen=True)
class Seen:
    """A request."""

    method: str
    path: str
    query: str
    body: Document = field(default_factory=dict)

    @property
    def is_watch(self) -> bool:
        return "watch=true" in self.query

    @property
    def is_lease(self) -> bool:
        return "/leases" in self.path

    @property
    def is_write(self) -> bool:
        return self.method != "GET" and not self.is_lease

    @property
    def is_broad_list(self) -> bool:
        """Of what is cached; a live check, which must be up to date, selects nothing."""
        return (
            self.method == "GET"
            and not self.is_watch
            and "limit=" in self.query
            and ("labelSelector" in self.query or "finetune.dev" in self.path)
        )


class Weather(Protocol):
    """Decides what happens. Called in the proxy's thread."""

    def fault(self, seen: Seen) -> Fault | None:
        """Of one request."""
        ...

    def watch_seconds(self) -> float:
        """How long a watch lasts until its fault."""
        ...

    def stall_seconds(self) -> float: ...

    async def kill(self) -> None:
        """Kill the operator; returns when it is gone."""
        ...


class ChaosProxy:
    """Context manager. `address`: where it listens."""

    def __init__(self, server: str, authority: str, weather: Weather) -> None:
        self._server = server
        self._tls = ssl.create_default_context(cafile=authority)
        self.weather = weather
        self.address = ""
        self._lists: dict[str, tuple[bytes, dict[str, str]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="chaos proxy", daemon=True)

    def __enter__(self) -> ChaosProxy:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        # Without a word on encodings: the server would compress long lists, and what it says of that is not passed on.
        session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, skip_auto_headers=["Accept-Encoding"]
        )
        async with session as self._client:
            application = web.Application(client_max_size=16 << 20)
            application.router.add_route("*", "/{path:.*}", self._serve)
            runner = web.AppRunner(application, shutdown_timeout=0.5)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stopping.wait()
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        try:
            body = json.loads(content) if content else {}
        except ValueError:
            body = {}
        seen = Seen(request.method, request.path, request.query_string, body)
        fault = self.weather.fault(seen)
        if fault is Fault.KILL_BEFORE:
            await self.weather.kill()
            return self._reset(request)
        if fault is Fault.RESET_BEFORE:
            return self._reset(request)
        if fault is Fault.TOO_MANY:
            return _refusal(429, "TooManyRequests", {"Retry-After": "1"})
        if fault is Fault.ERROR:
            return _refusal(500, "InternalError", {})
        if fault is Fault.STALL:
            await asyncio.sleep(self.weather.stall_seconds())
        key = request.path_qs + request.headers.get("Accept", "")
        if fault is Fault.STALE and key in self._lists:
            stale, headers = self._lists[key]
            return web.Response(body=stale, headers=headers)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        try:
            async with self._client.request(
                request.method, URL(f"{self._server}{request.raw_path}", encoded=True), data=content or None, headers=headers
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
                if seen.is_watch:
                    return await self._stream(request, answer, kept, fault)
                text = await answer.read()
        except aiohttp.ClientError:
            return self._reset(request)
        if fault is Fault.KILL_AFTER:
            await self.weather.kill()
            return self._reset(request)
        if fault is Fault.RESET_AFTER:
            return self._reset(request)
        if seen.is_broad_list and fault is None and answer.status == 200 and b'"continue"' not in text:
            self._lists[key] = (text, kept)
        return web.Response(body=text, status=answer.status, headers=kept)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, headers: dict[str, str], fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        seconds = None if fault is None else self.weather.watch_seconds()
        is_between_lines = True
        try:
            async with asyncio.timeout(seconds):
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                    is_between_lines = piece.endswith(b"\n")
        except TimeoutError:
            code = {Fault.WATCH_GONE: 410, Fault.WATCH_ERROR: 500}.get(fault) if fault is not None else None
            if code is None or not is_between_lines:
                return self._reset(request)
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "chaos"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        except (aiohttp.ClientError, ConnectionError, ValueError):
            return self._reset(request)
        return response

    @staticmethod
    def _reset(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)


def _refusal(code: int, reason: str, headers: dict[str, str]) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "reason": reason, "message": "chaos"}, status=code, headers=headers)

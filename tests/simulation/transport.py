"""The wire between the operator's real API client and the simulated server: requests take time, fail before or after they take
effect, hang, or are the last thing that the operator ever does."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from kubernetes.aio.client.configuration import Configuration

from finetune_operator.client import api as api_module
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import Kind
from tests.simulation.api_server import KINDS, ApiServer, Document, RefusedError, fields_match, labels_match

HOST = "http://simulated"
SNAPSHOTS = 6
"""Lists whose next pages can still be had."""


class Fault(Enum):
    """What becomes of a request."""

    NONE = "answered"
    UNREACHABLE = "connection refused"
    LOST_ANSWER = "carried out, the connection broke before the answer"
    HANGS = "no answer at all"
    CROWDED = "429"
    CROWDED_LATER = "429 with Retry-After"
    BROKEN = "500"
    BROKEN_AFTER = "carried out, answered with 500"
    DEATH_BEFORE = "the operator dies before it is sent"
    DEATH_AFTER = "carried out, the operator dies before the answer"


ORDINARY_FAULTS = tuple(fault for fault in Fault if fault is not Fault.NONE and "DEATH" not in fault.name)
DEATHS = (Fault.DEATH_BEFORE, Fault.DEATH_AFTER)


@dataclass(frozen=True)
class Call:
    """One request of the operator that reached the server."""

    at: float
    verb: str
    kind: Kind | None
    name: str
    fault: Fault
    body: Mapping[str, Any] | None = None


@dataclass
class Weather:
    """How often requests fail, and how long they take. The numbers are shares of all requests."""

    faults: float = 0.0
    deaths: float = 0.0
    latency: float = 0.01
    """Longest time on either way, in seconds."""


@dataclass
class Response:
    """The part of an HTTP response that the client reads."""

    status: int
    document: Document
    headers: Mapping[str, str] = field(default_factory=dict)

    async def read(self) -> bytes:
        return json.dumps(self.document).encode()


class Wire:
    """Stands where `ApiClient` does: one for each life of the operator."""

    def __init__(
        self, server: ApiServer, weather: Weather, rng: random.Random, on_call: Callable[[Call], None], die: Callable[[], None]
    ) -> None:
        self.configuration = Configuration(host=HOST)
        self.user_agent = ""
        self.rest_client = self
        self.dead = False
        self._server = server
        self._weather = weather
        self._random = rng
        self._on_call = on_call
        self._die = die
        self._snapshots: dict[str, tuple[str, list[Document]]] = {}
        self._num_lists = 0

    async def update_params_for_auth(self, *_: Any) -> None:
        """Nobody asks for credentials."""

    async def close(self) -> None:
        """Nothing is open."""

    async def request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: Any = None, _request_timeout: Any = None
    ) -> Response:
        """One request; only the answer may be lost, never its order within this coroutine."""
        await self._pause()
        fault = self._fault()
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        kind, namespace, name, subresource = _place(parts.path)
        self._on_call(Call(asyncio.get_running_loop().time(), _verb(method, name), kind, name, fault, body))
        match fault:
            case Fault.UNREACHABLE:
                raise aiohttp.ServerDisconnectedError
            case Fault.HANGS:
                await asyncio.sleep(_seconds(_request_timeout))
                raise TimeoutError
            case Fault.CROWDED:
                return _status(429, "TooManyRequests", "slow down")
            case Fault.CROWDED_LATER:
                return Response(429, _document(429, "TooManyRequests", "slow down"), {"Retry-After": "1"})
            case Fault.BROKEN:
                return _status(500, "InternalError", "etcdserver: leader changed")
            case Fault.DEATH_BEFORE:
                await self._end()
        response = self._answer(method, kind, namespace, name, subresource, query, headers or {}, body)
        if fault is Fault.DEATH_AFTER:
            await self._end()
        await self._pause()
        if fault is Fault.LOST_ANSWER:
            raise aiohttp.ServerDisconnectedError
        if fault is Fault.BROKEN_AFTER and method != "GET":
            return _status(500, "InternalError", "etcdserver: request timed out")
        return response

    async def _pause(self) -> None:
        # Always some time: a pass that begins again and again at once shows in the calls per second.
        await asyncio.sleep(0.001 + self._random.random() * self._weather.latency)
        if self.dead:
            await asyncio.Event().wait()

    async def _end(self) -> None:
        self._die()
        await asyncio.Event().wait()

    def _fault(self) -> Fault:
        drawn = self._random.random()
        if drawn < self._weather.deaths:
            return self._random.choice(DEATHS)
        if drawn < self._weather.deaths + self._weather.faults:
            return self._random.choice(ORDINARY_FAULTS)
        return Fault.NONE

    def _answer(
        self,
        method: str,
        kind: Kind | None,
        namespace: str,
        name: str,
        subresource: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Any,
    ) -> Response:
        if kind is None:
            return _status(404, "NotFound", "the server could not find the requested resource")
        refusal = self._server.refuses(method, kind, name)
        if refusal is not None:
            return _status(refusal.code, refusal.reason, refusal.message)
        self._server.by_operator = True
        try:
            if method == "GET" and not name:
                return self._list(kind, namespace, query, headers)
            document = self._carry_out(method, kind, namespace, name, subresource, headers, body)
        except RefusedError as refusal:
            return _status(refusal.code, refusal.reason, refusal.message)
        finally:
            self._server.by_operator = False
        return Response(201 if method == "POST" else 200, document)

    def _carry_out(
        self, method: str, kind: Kind, namespace: str, name: str, subresource: str, headers: Mapping[str, str], body: Any
    ) -> Document:
        server = self._server
        match method:
            case "GET":
                found = server.get(kind, namespace, name)
                if found is None:
                    raise RefusedError(404, "NotFound", f'{kind.plural} "{name}" not found')
                return _metadata(found) if "PartialObjectMetadata" in headers.get("Accept", "") else found
            case "POST":
                return server.create(kind, namespace, json.loads(json.dumps(body)))
            case "PUT":
                return server.replace(kind, namespace, name, json.loads(json.dumps(body)))
            case "PATCH" if subresource == "status":
                return server.patch_status(kind, namespace, name, json.loads(json.dumps(body)))
            case "PATCH":
                return server.patch(kind, namespace, name, json.loads(json.dumps(body)))
            case "DELETE":
                options = body or {}
                expected = options.get("preconditions") or {}
                left = server.delete(
                    kind,
                    namespace,
                    name,
                    uid=expected.get("uid", ""),
                    version=expected.get("resourceVersion", ""),
                    policy=options.get("propagationPolicy"),
                    grace=options.get("gracePeriodSeconds"),
                )
                return left or {"kind": "Status", "status": "Success"}
        raise AssertionError(f"the simulation does not know {method} {kind.plural} {subresource}")

    def _list(self, kind: Kind, namespace: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Response:
        server = self._server
        limit = int(query.get("limit", "0"))
        token = query.get("continue", "")
        if token:
            key, _, offset = token.rpartition(":")
            if key not in self._snapshots:
                raise RefusedError(410, "Expired", "the provided continue parameter is too old")
            version, found = self._snapshots[key]
            start = int(offset)
        else:
            found = [
                item
                for item in server.all(kind, namespace or None)
                if labels_match(item, query.get("labelSelector", "")) and fields_match(item, query.get("fieldSelector", ""))
            ]
            version, start = str(server.version), 0
            self._num_lists += 1
            key = str(self._num_lists)
            self._snapshots[key] = (version, found)
            # Old ones expire, as etcd's compaction has it.
            self._snapshots.pop(str(self._num_lists - SNAPSHOTS), None)
        page = found[start : start + limit] if limit else found
        rest = len(found) - start - len(page)
        metadata: Document = {"resourceVersion": version}
        if rest > 0:
            metadata |= {"continue": f"{key}:{start + len(page)}", "remainingItemCount": rest}
        if "PartialObjectMetadataList" in headers.get("Accept", ""):
            # A list of the metadata of nothing has null for its items; a typed one has an empty list.
            items: Any = [_metadata(item) for item in page] or None
            return Response(200, {"kind": "PartialObjectMetadataList", "metadata": metadata, "items": items})
        # Items of a list carry neither apiVersion nor kind.
        items = [{key: value for key, value in item.items() if key not in ("apiVersion", "kind")} for item in page]
        return Response(200, {"kind": f"{kind.name}List", "metadata": metadata, "items": items})


def simulated_api(wire: Wire, **options: Any) -> Api:
    """The real client on a simulated wire."""
    with patch.object(api_module, "ApiClient", lambda _: wire):
        return Api(wire.configuration, **options)


def _place(path: str) -> tuple[Kind | None, str, str, str]:
    """Kind, namespace, name and subresource of a path."""
    for kind in KINDS:
        if not path.startswith(kind.root + "/"):
            continue
        parts = path.removeprefix(kind.root + "/").split("/")
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        if parts[0] == kind.plural:
            rest = [*parts[1:], "", ""]
            return kind, namespace, rest[0], rest[1]
    return None, "", "", ""


def _verb(method: str, name: str) -> str:
    return "LIST" if method == "GET" and not name else method


def _metadata(item: Document) -> Document:
    return {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": item["metadata"]}


def _document(code: int, reason: str, message: str) -> Document:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


def _status(code: int, reason: str, message: str) -> Response:
    return Response(code, _document(code, reason, message))


def _seconds(timeout: Any) -> float:
    total = getattr(timeout, "total", timeout)
    return float(total) if total else 30.0

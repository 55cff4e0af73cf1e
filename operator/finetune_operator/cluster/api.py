"""A thin client of the API server: plain dicts in and out, as many at a time as the server takes, Retry-After honoured.

It stands on kubernetes.aio for configuration, credentials and connections, and not on its models: parsing typed lists costs
ten times the time of plain JSON, and the cache keeps projections of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from finetune_operator.cluster.errors import ApiError, ApiUnreachableError
from finetune_operator.cluster.fence import Fence, FencedConnections
from finetune_operator.cluster.in_flight import InFlight
from finetune_operator.cluster.kinds import Kind

Document = dict[str, Any]


class Answered(NamedTuple):
    """One request that was sent, for the metrics."""

    verb: str
    """HTTP method, or LIST."""
    resource: str
    """Plural and subresource, as in `jobs` or `finetunejobs/status`."""
    code: str
    """HTTP status; `error` where no answer came."""
    reason: str
    """The server's word for a refusal, as in `AlreadyExists`; empty without one."""


class Page(NamedTuple):
    """Part of a list."""

    items: list[Document]
    version: str
    """resourceVersion of the list."""
    is_first: bool
    """Whether what came before is void: the list was begun, perhaps for another time."""


RequestObserver = Callable[[Answered], None]

ATTEMPTS = 5
"""How often one request is sent at most while the server says "later"."""
LISTINGS = 3
"""How often a list that expires midway is begun."""
SHORTEST_RETRY_AFTER = 0.1
LONGEST_RETRY_AFTER = 30.0
LATER = (429, 500, 503, 504)
"""Answers that may come with Retry-After."""
OVERLOADED = (429, 503)
METADATA_LIST = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
MERGE_PATCH = "application/merge-patch+json"


class Api:
    """Requests of one event loop. `observer` learns of every request, for the metrics. `fence` is looked at before each one."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        in_flight: InFlight | None = None,
        request_timeout: float = 30.0,
        page_size: int = 500,
        observer: RequestObserver | None = None,
        fence: Fence | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = ApiClient(configuration)
        self._client.user_agent = "finetune-operator"
        if fence is not None:
            self._client.rest_client = FencedConnections(configuration, fence)
        self._fence = fence or _unfenced
        self._in_flight = in_flight
        self._timeout = aiohttp.ClientTimeout(total=request_timeout)
        self._page_size = page_size
        self._observer = observer or _unobserved
        self._sleep = sleep
        self._clock = clock

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        metadata_only: bool = False,
    ) -> tuple[list[Document], str]:
        """All objects, fetched in pages, and the resourceVersion of the list."""
        items: list[Document] = []
        version = ""
        async for page in self.pages(
            kind, namespace, label_selector=label_selector, field_selector=field_selector, metadata_only=metadata_only
        ):
            items = page.items if page.is_first else items + page.items
            version = page.version
        return items, version

    async def pages(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        metadata_only: bool = False,
    ) -> AsyncIterator[Page]:
        """The same page by page, so that no more than one is held. A list that expired midway is begun again."""
        query = {"limit": str(self._page_size)}
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        accept = METADATA_LIST if metadata_only else None
        token, listings = "", 1
        while True:
            page_query = query | ({"continue": token} if token else {})
            try:
                page = await self.request("GET", kind.path(namespace), page_query, verb="LIST", accept=accept)
            except ApiError as error:
                if error.code == 410 and token and listings < LISTINGS:
                    token, listings = "", listings + 1
                    continue
                raise
            # A list of nothing comes with `items: null`.
            part, metadata = page.get("items") or [], page.get("metadata")
            if not isinstance(part, list) or not isinstance(metadata, dict) or "resourceVersion" not in metadata:
                raise ApiUnreachableError(f"LIST {kind.path(namespace)}: the answer is not a list of objects")
            yield Page(part, str(metadata["resourceVersion"]), is_first=not token)
            token = metadata.get("continue") or ""
            if not token:
                return

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Document | None:
        """The object, or None where there is none."""
        try:
            return await self.request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Document:
        """Create and return what the server made of it."""
        return await self.request("POST", kind.path(namespace), body=body)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Document:
        """Replace; the resourceVersion in the body is a precondition."""
        return await self.request("PUT", kind.path(namespace, name), body=body)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Document:
        """JSON merge patch; a resourceVersion in its metadata is a precondition."""
        return await self.request("PATCH", kind.path(namespace, name, subresource), body=patch, content_type=MERGE_PATCH)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, force: bool = False) -> Document:
        """Delete in the foreground, dependents first. `uid`: precondition; empty: none. `force`: without a grace period.

        The policy is always given: the server's default for Jobs orphans their pods. Returns the object as long as something
        holds it, a Status once it is gone.
        """
        options: Document = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if force:
            options["gracePeriodSeconds"] = 0
        return await self.request("DELETE", kind.path(namespace, name), body=options)

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        accept: str | None = None,
        verb: str | None = None,
    ) -> Document:
        """One request, sent again while the server answers with Retry-After.

        Raises:
            ApiError: the server refused it.
            ApiUnreachableError: no answer came; a write may have happened all the same.
            NotLeadingError: it was not sent, because another replica may hold the lease.
        """
        verb, resource = verb or method, resource_of(path)
        url = f"{self._client.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        for remaining in reversed(range(ATTEMPTS)):
            headers = {"Accept": accept or "application/json", "Content-Type": content_type, "User-Agent": self._client.user_agent}
            try:
                await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
                async with self._slot():
                    self._fence()
                    response = await self._client.rest_client.request(
                        method, url, headers=headers, body=None if body is None else dict(body), _request_timeout=self._timeout
                    )
                    content = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._observer(Answered(verb, resource, "error", ""))
                raise ApiUnreachableError(f"{verb} {path}: {type(error).__name__}: {error}") from error
            if 200 <= response.status < 300:
                self._observer(Answered(verb, resource, str(response.status), ""))
                if self._in_flight is not None:
                    self._in_flight.went_well()
                return _document(f"{verb} {path}", content)
            asked = retry_after_seconds(response.headers.get("Retry-After"), self._clock())
            refusal = _refusal(verb, path, response.status, asked, content)
            self._observer(Answered(verb, resource, str(response.status), refusal.reason))
            if self._in_flight is not None and refusal.code in OVERLOADED:
                self._in_flight.was_too_much()
            if not (remaining and refusal.retry_after and refusal.code in LATER):
                raise refusal
            await self._sleep(refusal.retry_after)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _slot(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._in_flight is None else self._in_flight.slot()


def retry_after_seconds(value: str | None, now: float) -> float:
    """Seconds to wait by a Retry-After header, in seconds or as a date, within bounds; 0 where none can be read.

    `now`: seconds since the epoch.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdigit():
        # Longer numbers are cut before they are read: past the bound their size does not matter.
        seconds = float(text[:9])
    else:
        try:
            moment = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError, OverflowError):
            return 0.0
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
    return min(max(seconds, SHORTEST_RETRY_AFTER), LONGEST_RETRY_AFTER)


def resource_of(path: str) -> str:
    """Plural and subresource of a path: what the metrics count by. Empty for paths that are no resource's."""
    parts = path.split("/")[1:]
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
    if len(parts) > 2 and parts[0] == "namespaces":
        parts = parts[2:]
    return "/".join([*parts[:1], *parts[2:3]])


def _unobserved(_: Answered) -> None:
    """For clients whose requests nobody counts."""


def _unfenced() -> None:
    """For clients that need no lease."""


def _document(request: str, content: bytes) -> Document:
    """An answer that is not a JSON object came from something between us and the API server."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ApiUnreachableError(f"{request}: the answer is not JSON: {content[:100]!r}") from error
    if not isinstance(document, dict):
        raise ApiUnreachableError(f"{request}: the answer is not an object: {content[:100]!r}")
    return document


def _refusal(verb: str, path: str, code: int, retry_after: float, content: bytes) -> ApiError:
    try:
        status = json.loads(content)
        reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", content.decode(errors="replace")[:500]
    return ApiError(f"{verb} {path}", code, reason, message, retry_after)

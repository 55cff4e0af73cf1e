"""A thin client of the API server. It takes and returns plain dicts, sends as many requests at a time as the server accepts,
and honours Retry-After.

It uses kubernetes.aio for configuration, credentials and connections, but not its models: parsing typed lists costs ten times
the time of plain JSON, and the cache keeps projections of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from finetune_job.names import MERGE_PATCH
from finetune_operator.cluster.answers import (
    AnsweredRequest,
    ApiError,
    ApiUnreachableError,
    Document,
    document_of,
    refusal_of,
    resource_of,
    retry_after_seconds,
)
from finetune_operator.cluster.fence import Fence, FencedConnections
from finetune_operator.cluster.in_flight import RequestLimiter
from finetune_operator.cluster.kinds import Kind

__all__ = ["AnsweredRequest", "Api", "Document", "Page", "resource_of", "retry_after_seconds"]


class Page(NamedTuple):
    """Part of a list."""

    items: list[Document]
    version: str
    """resourceVersion of the list."""
    is_first: bool
    """Whether the list begins here, perhaps again: earlier pages are void."""


RequestObserver = Callable[[AnsweredRequest], None]

ATTEMPTS = 5
"""How often one request is sent at most while the server says "later"."""
PAGE_SIZE = 100
"""Objects of one page of a list. A process keeps the memory that its largest page took: after a start with 1,000 jobs 141 MB, and
162 MB with pages of 500."""
LISTINGS = 3
"""How often a list that expires midway is begun at most."""
LATER = (429, 500, 503, 504)
"""Answers that may come with Retry-After."""
OVERLOADED = (429, 503)
METADATA_LIST = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
APPLY_PATCH = "application/apply-patch+yaml"


class Api:
    """Sends the requests of one event loop. `observer` is called for every request, for the metrics, and `fence` before each
    one.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        in_flight: RequestLimiter | None = None,
        request_timeout: float = 30.0,
        page_size: int = PAGE_SIZE,
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
        """Yield a list page by page, so that only one page is in memory. A list that expires midway is begun again."""
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
        """Create an object. Returns it as the server stored it."""
        return await self.request("POST", kind.path(namespace), body=body)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Document:
        """Replace an object; the resourceVersion in the body is a precondition."""
        return await self.request("PUT", kind.path(namespace, name), body=body)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Document:
        """Send a JSON merge patch; a resourceVersion in its metadata is a precondition."""
        return await self.request("PATCH", kind.path(namespace, name, subresource), body=patch, content_type=MERGE_PATCH)

    async def apply(self, kind: Kind, name: str, body: Mapping[str, Any], field_manager: str, *, force: bool = False) -> Document:
        """Apply a cluster-scoped object on the server's side. Without `force`, fields that another manager has set to other
        values are a conflict.
        """
        query = {"fieldManager": field_manager, "force": str(force).lower()}
        return await self.request("PATCH", kind.path(None, name), query, body=body, content_type=APPLY_PATCH, verb="APPLY")

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, force: bool = False) -> Document:
        """Delete in the foreground, dependents first. `uid`: precondition. `force`: without a grace period.

        The policy is always given: the server's default for Jobs orphans their pods. Returns the object as long as something
        holds it, a Status once it is gone.
        """
        options: Document = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
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
        """Send a request, and send it again while the server answers with Retry-After.

        Raises:
            ApiError: the server refused it.
            ApiUnreachableError: no answer came; a write may have happened all the same.
            NotLeadingError: it was not sent, because another replica may hold the lease.
        """
        verb, resource = verb or method, resource_of(path)
        url = f"{self._client.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        for remaining in reversed(range(ATTEMPTS)):
            headers = {
                "Accept": accept or "application/json",
                "Content-Type": content_type,
                "User-Agent": self._client.user_agent,
            }
            try:
                await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
                async with self._slot():
                    self._fence()
                    response = await self._client.rest_client.request(
                        method, url, headers=headers, body=None if body is None else dict(body), _request_timeout=self._timeout
                    )
                    content = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._observer(AnsweredRequest(verb, resource, "error", ""))
                raise ApiUnreachableError(f"{verb} {path}: {type(error).__name__}: {error}") from error
            if 200 <= response.status < 300:
                self._observer(AnsweredRequest(verb, resource, str(response.status), ""))
                if self._in_flight is not None:
                    self._in_flight.went_well()
                return document_of(f"{verb} {path}", content)
            asked = retry_after_seconds(response.headers.get("Retry-After"), self._clock())
            refusal = refusal_of(verb, path, response.status, asked, content)
            self._observer(AnsweredRequest(verb, resource, str(response.status), refusal.reason))
            if self._in_flight is not None and refusal.code in OVERLOADED:
                self._in_flight.was_too_much()
            if not (remaining and refusal.retry_after and refusal.code in LATER):
                raise refusal
            await self._sleep(refusal.retry_after)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def stream(self, path: str, query: Mapping[str, str], longest_silence: float) -> AsyncIterator[bytes]:
        """Yield the chunks of a long answer. It does not count among the requests under way.

        Raises the same as `request`, and ApiUnreachableError after so many seconds without a byte.
        """
        verb, resource = "WATCH", resource_of(path)
        url = f"{self._client.configuration.host}{path}?{urlencode(query)}"
        headers = {"Accept": "application/json", "User-Agent": self._client.user_agent}
        timeout = aiohttp.ClientTimeout(sock_connect=self._timeout.total, sock_read=longest_silence)
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
            self._fence()
            answer = await self._client.rest_client.request("GET", url, headers=headers, _request_timeout=timeout)
            async with answer.response as response:
                if response.status != 200:
                    asked = retry_after_seconds(response.headers.get("Retry-After"), self._clock())
                    refusal = refusal_of(verb, path, response.status, asked, await response.read())
                    self._observer(AnsweredRequest(verb, resource, str(response.status), refusal.reason))
                    raise refusal
                self._observer(AnsweredRequest(verb, resource, "200", ""))
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._observer(AnsweredRequest(verb, resource, "error", ""))
            raise ApiUnreachableError(f"{verb} {path}: {type(error).__name__}: {error}") from error

    def _slot(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._in_flight is None else self._in_flight.slot()


def _unobserved(_: AnsweredRequest) -> None:
    """The observer of clients whose requests are not counted."""


def _unfenced() -> None:
    """The fence of clients that need no lease."""

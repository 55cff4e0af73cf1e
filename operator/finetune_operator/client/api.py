"""A thin client of the API server. It takes and returns plain dicts, limits the number of concurrent requests, and honours
Retry-After.

It uses kubernetes.aio for configuration, credentials and connections, but not its models: parsing lists into models takes ten
times as long as parsing plain JSON, and the cache keeps its own projections anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from finetune_job.names import MERGE_PATCH
from finetune_operator.client.answers import (
    AnsweredRequest,
    ApiError,
    ApiUnreachableError,
    Document,
    document_of,
    refusal_of,
    resource_of,
    retry_after_seconds,
)
from finetune_operator.client.fence import Fence, FencedConnections
from finetune_operator.client.kinds import Kind


class Page(NamedTuple):
    """One page of a list."""

    items: list[Document]
    version: str
    """resourceVersion of the list."""
    is_first: bool
    """Whether the list starts, or starts over, with this page; if so, discard earlier pages."""


ATTEMPTS = 5
"""Maximum number of times that a request is sent if the server asks to retry it later."""
PAGE_SIZE = 100
"""Number of objects per page of a list. A process never returns the memory of its largest page: after a start with 1,000 jobs it
takes 141 MB, but 162 MB with pages of 500 objects."""
LISTINGS = 3
"""Maximum number of attempts at a list that keeps expiring midway."""
LATER = (429, 500, 503, 504)
"""HTTP statuses of answers that may have a Retry-After header."""
METADATA_LIST = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
APPLY_PATCH = "application/apply-patch+yaml"


class Api:
    """Sends the requests of one event loop, a limited number at a time. `fence` is called before each request, and `observer`
    after each, for the metrics.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        most_in_flight: int | None = None,
        request_timeout: float = 30.0,
        page_size: int = PAGE_SIZE,
        observer: Callable[[AnsweredRequest], None] | None = None,
        fence: Fence | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = ApiClient(configuration)
        self._client.user_agent = "finetune-operator"
        if fence is not None:
            self._client.rest_client = FencedConnections(configuration, fence)
        self._fence = fence or (lambda: None)
        self._slots = nullcontext() if most_in_flight is None else asyncio.Semaphore(most_in_flight)
        self._timeout = aiohttp.ClientTimeout(total=request_timeout)
        self._page_size = page_size
        self._observer = observer or (lambda _: None)
        self._sleep = sleep
        self._clock = clock

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def list(self, kind: Kind, namespace: str | None = None, **options: Any) -> list[Document]:
        """Return all objects, which are fetched in pages. `options` are those of `pages`."""
        items: list[Document] = []
        async for page in self.pages(kind, namespace, **options):
            items = page.items if page.is_first else items + page.items
        return items

    async def pages(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        metadata_only: bool = False,
    ) -> AsyncIterator[Page]:
        """Yield a list page by page, so that only one page is in memory. A list that expires midway is started over."""
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
            # An empty list may have `items: null`.
            part, metadata = page.get("items") or [], page.get("metadata")
            if not isinstance(part, list) or not isinstance(metadata, dict) or "resourceVersion" not in metadata:
                raise ApiUnreachableError(f"LIST {kind.path(namespace)}: the answer is not a list of objects")
            yield Page(part, str(metadata["resourceVersion"]), is_first=not token)
            token = metadata.get("continue") or ""
            if not token:
                return

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Document | None:
        """Return the object, or None if it does not exist."""
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
        """Replace an object. The resourceVersion in the body is a precondition."""
        return await self.request("PUT", kind.path(namespace, name), body=body)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Document:
        """Send a JSON merge patch. A resourceVersion in its metadata is a precondition."""
        return await self.request("PATCH", kind.path(namespace, name, subresource), body=patch, content_type=MERGE_PATCH)

    async def apply(self, kind: Kind, name: str, body: Mapping[str, Any], field_manager: str, *, force: bool = False) -> Document:
        """Apply a cluster-scoped object with server-side apply. Without `force`, this is a conflict if another manager has set a
        field to a different value.
        """
        query = {"fieldManager": field_manager, "force": str(force).lower()}
        return await self.request("PATCH", kind.path(None, name), query, body=body, content_type=APPLY_PATCH, verb="APPLY")

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, force: bool = False) -> Document:
        """Delete in the foreground: dependents go first. `uid`: precondition. `force`: whether to skip the grace period.

        The propagation policy is always set, because the server's default for Jobs would orphan their pods. Returns the object if
        something still keeps it, else a Status.
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
        """Send a request, and repeat it while the server answers with Retry-After.

        Raises:
            ApiError: the server refused it.
            ApiUnreachableError: no answer came; a write may have been carried out nevertheless.
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
                async with self._slots:
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
                return document_of(f"{verb} {path}", content)
            asked = retry_after_seconds(response.headers.get("Retry-After"), self._clock())
            refusal = refusal_of(verb, path, response.status, asked, content)
            self._observer(AnsweredRequest(verb, resource, str(response.status), refusal.reason))
            if not (remaining and refusal.retry_after and refusal.code in LATER):
                raise refusal
            await self._sleep(refusal.retry_after)
        raise AssertionError("unreachable: the last attempt returns or raises")

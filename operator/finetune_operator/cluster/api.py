"""A thin client of the API server: plain dicts in and out, writes limited by a token bucket, Retry-After honoured.

It stands on kubernetes.aio for configuration, credentials and connections, and not on its models: parsing typed lists costs
ten times the time of plain JSON, and the cache keeps projections of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from finetune_operator.cluster.errors import ApiError, ApiUnreachableError
from finetune_operator.cluster.fence import Fence, FencedConnections
from finetune_operator.cluster.kinds import Kind
from finetune_operator.cluster.token_bucket import TokenBucket

Document = dict[str, Any]
RequestObserver = Callable[[str, str], None]
"""Called with verb and HTTP status (`error` where no answer came) of every request."""

ATTEMPTS = 5
"""How often one request is sent at most while the server says "later"."""
LONGEST_RETRY_AFTER = 30.0
METADATA_LIST = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
MERGE_PATCH = "application/merge-patch+json"


class Api:
    """Requests of one event loop. `observer` learns of every request, for the metrics. `fence` is looked at before each one."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        writes: TokenBucket | None = None,
        request_timeout: float = 30.0,
        page_size: int = 500,
        observer: RequestObserver | None = None,
        fence: Fence | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = ApiClient(configuration)
        self._client.user_agent = "finetune-operator"
        if fence is not None:
            self._client.rest_client = FencedConnections(configuration, fence)
        self._fence = fence or _unfenced
        self._writes = writes
        self._timeout = aiohttp.ClientTimeout(total=request_timeout)
        self._page_size = page_size
        self._observer = observer or _unobserved
        self._sleep = sleep

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
        """All objects, fetched in pages, and the resourceVersion of the list. A list that expired midway is begun again."""
        query = {"limit": str(self._page_size)}
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        accept = METADATA_LIST if metadata_only else None
        items: list[Document] = []
        token = ""
        while True:
            page_query = query | ({"continue": token} if token else {})
            try:
                page = await self.request("GET", kind.path(namespace), page_query, verb="LIST", accept=accept)
            except ApiError as error:
                if error.code == 410 and token:
                    items, token = [], ""
                    continue
                raise
            items += page["items"]
            token = page["metadata"].get("continue") or ""
            if not token:
                return items, str(page["metadata"]["resourceVersion"])

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

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete in the foreground, dependents first. `uid`: precondition; empty: none.

        The policy is always given: the server's default for Jobs orphans their pods.
        """
        options: Document = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            options["preconditions"] = {"uid": uid}
        await self.request("DELETE", kind.path(namespace, name), body=options)

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
        verb = verb or method
        url = f"{self._client.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        for remaining in reversed(range(ATTEMPTS)):
            if self._writes is not None and method != "GET":
                await self._writes.take()
            headers = {"Accept": accept or "application/json", "Content-Type": content_type, "User-Agent": self._client.user_agent}
            try:
                await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
                self._fence()
                response = await self._client.rest_client.request(
                    method, url, headers=headers, body=None if body is None else dict(body), _request_timeout=self._timeout
                )
                content = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._observer(verb, "error")
                raise ApiUnreachableError(f"{verb} {path}: {type(error).__name__}: {error}") from error
            self._observer(verb, str(response.status))
            if 200 <= response.status < 300:
                document: Document = json.loads(content)
                return document
            refusal = _refusal(verb, path, response.status, response.headers.get("Retry-After"), content)
            if not (remaining and refusal.retry_after and refusal.code in (429, 500, 503, 504)):
                raise refusal
            await self._sleep(min(refusal.retry_after, LONGEST_RETRY_AFTER))
        raise AssertionError("unreachable: the last attempt returns or raises")


def _unobserved(verb: str, code: str) -> None:
    """For clients whose requests nobody counts."""


def _unfenced() -> None:
    """For clients that need no lease."""


def _refusal(verb: str, path: str, code: int, retry_after: str | None, content: bytes) -> ApiError:
    try:
        status = json.loads(content)
        reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", content.decode(errors="replace")[:500]
    seconds = float(retry_after) if retry_after is not None and retry_after.isdigit() else 0.0
    return ApiError(f"{verb} {path}", code, reason, message, seconds)

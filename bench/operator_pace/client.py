"""The harness's own client: plain dicts, many requests at a time, watches as streams."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

Document = dict[str, Any]
JOBS = "/apis/finetune.dev/v1alpha1/namespaces/{}/finetunejobs"
BATCH_JOBS = "/apis/batch/v1/namespaces/{}/jobs"
PODS = "/api/v1/namespaces/{}/pods"
CONFIG_MAPS = "/api/v1/namespaces/{}/configmaps"
EVENTS = "/api/v1/namespaces/{}/events"
MERGE_PATCH = "application/merge-patch+json"
METADATA = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
LARGEST_EVENT = 2**22
GATEWAY_TIMEOUT = 504
MOST_DELETIONS = 20


class RefusedError(Exception):
    """The API server did not answer 2xx."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Administrator's requests. Async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    async def __aenter__(self) -> Client:
        configuration = Configuration()
        await config.load_kube_config(config_file=str(self._kubeconfig), client_configuration=configuration)
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
        self._host = configuration.host
        connector = aiohttp.TCPConnector(limit=100, ssl=context)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=LARGEST_EVENT)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Document:
        """One request; raises RefusedError."""
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._host + path, data=data, headers={"Content-Type": content_type}
        ) as response:
            content = await response.read()
            if not 200 <= response.status < 300:
                raise RefusedError(f"{method} {path}: {response.status}: {content[:500]!r}", response.status)
            document: Document = json.loads(content)
            return document

    async def create(self, collection: str, body: Document) -> Document:
        """Create an object."""
        return await self.request("POST", collection, body)

    async def patch_status(self, collection: str, name: str, status: Document) -> Document:
        """Merge into the status of an object."""
        return await self.request("PATCH", f"{collection}/{name}/status", {"status": status}, MERGE_PATCH)

    async def delete_all(self, collection: str) -> None:
        """Delete what is in a collection. Of thousands of objects one request does not delete all before it times out."""
        for _ in range(MOST_DELETIONS):
            try:
                await self.request("DELETE", collection, {"propagationPolicy": "Background"})
            except RefusedError as error:
                if error.status != GATEWAY_TIMEOUT:
                    raise
            else:
                return
        raise RefusedError(f"DELETE {collection}: timed out {MOST_DELETIONS} times", GATEWAY_TIMEOUT)

    async def watch(self, collection: str, *, metadata_only: bool = False) -> AsyncIterator[Document]:
        """Events of a collection from its beginning, over any number of connections. Raises RefusedError."""
        headers = {"Accept": METADATA} if metadata_only else {}
        timeout = aiohttp.ClientTimeout(total=None)
        query = "watch=1"
        while True:
            try:
                async with self._session.get(f"{self._host}{collection}?{query}", headers=headers, timeout=timeout) as response:
                    # An API server that has just started says 503 until it knows all paths, and 429 until its caches are filled.
                    if response.status not in (200, 429, 503):
                        content = await response.read()
                        raise RefusedError(f"watch {collection}: {response.status}: {content[:500]!r}", response.status)
                    async for line in response.content:
                        event = json.loads(line)
                        if response.status != 200:
                            continue
                        if event["type"] == "ERROR":
                            raise RefusedError(f"watch {collection}: {event['object']}", response.status)
                        query = f"watch=1&resourceVersion={event['object']['metadata']['resourceVersion']}"
                        yield event
            except aiohttp.ClientError:
                pass
            # The server ends watches, those of slow readers first, or is killed in the middle of a line.
            await asyncio.sleep(0.1)

"""A Lease on the API server."""

from __future__ import annotations

from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.kinds import LEASES


class LeaseObject:
    """The Lease of one name in one namespace. `metadata`: its labels and annotations."""

    def __init__(self, api: Api, namespace: str, name: str, metadata: Document | None = None) -> None:
        self._api = api
        self._metadata = metadata or {}
        self._namespace = namespace
        self._name = name

    async def read(self) -> Document | None:
        """The Lease, or None."""
        return await self._api.get(LEASES, self._namespace, self._name)

    async def create(self, spec: Document) -> Document:
        """Make it; raises ApiError with a conflict where it is there."""
        metadata = {"name": self._name, "namespace": self._namespace, **self._metadata}
        body = {"apiVersion": LEASES.api_version, "kind": LEASES.name, "metadata": metadata, "spec": spec}
        return await self._api.create(LEASES, self._namespace, body)

    async def replace(self, lease: Document) -> Document:
        """Write it, its resourceVersion being a precondition."""
        changed = lease | {"metadata": lease["metadata"] | self._metadata}
        return await self._api.replace(LEASES, self._namespace, self._name, changed)

"""An API server of plain dictionaries, at the edge where the real client would be, and a clock that a test moves."""

import copy
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.api import Page
from finetune_operator.client.kinds import Kind

Document = dict[str, Any]


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeApi:
    """Keeps objects by kind, namespace and name, and every call. `fail`: raised by the next call of that verb."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Document] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.deletes: list[tuple[str, str, str, bool]] = []
        """Kind, name, UID precondition, and whether by force."""
        self.deletes_slowly = False
        """Whether something holds what is deleted, as a finalizer does."""
        self.fail: dict[str, list[Exception]] = {}
        self._numbers = itertools.count(1)

    def put(self, kind: Kind, document: Document) -> Document:
        """Something that somebody else made."""
        metadata = document["metadata"]
        number = next(self._numbers)
        metadata.setdefault("uid", f"uid-{number}")
        metadata["resourceVersion"] = str(number)
        stored = {"apiVersion": kind.api_version, "kind": kind.name, **document}
        self.objects[kind.name, metadata.get("namespace", ""), metadata["name"]] = stored
        return copy.deepcopy(stored)

    async def list(
        self, kind: Kind, namespace: str | None = None, *, metadata_only: bool = False, **selectors: str | None
    ) -> list[Document]:
        self._called("list", kind, "")
        found = [item for (name, place, _), item in self.objects.items() if name == kind.name and namespace in (None, place)]
        found = [item for item in found if _is_selected(item, selectors)]
        if metadata_only:
            found = [{"metadata": item["metadata"]} for item in found]
        return copy.deepcopy(found)

    async def pages(self, kind: Kind, namespace: str | None = None, **options: Any) -> AsyncIterator[Page]:
        items = await self.list(kind, namespace, **options)
        yield Page(items, str(next(self._numbers)), is_first=True)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Document | None:
        self._called("get", kind, name)
        return copy.deepcopy(self.objects.get((kind.name, namespace or "", name)))

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Document:
        self._called("create", kind, body["metadata"]["name"])
        if (kind.name, namespace, body["metadata"]["name"]) in self.objects:
            raise ApiError("create", 409, "AlreadyExists", "taken")
        document = copy.deepcopy(dict(body))
        document["metadata"]["namespace"] = namespace
        return self.put(kind, document)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Document:
        self._called("replace", kind, name)
        stored = self.objects.get((kind.name, namespace, name))
        if stored is None:
            raise ApiError("replace", 404, "NotFound", "gone")
        if body["metadata"].get("resourceVersion") != stored["metadata"]["resourceVersion"]:
            raise ApiError("replace", 409, "Conflict", "changed")
        return self.put(kind, copy.deepcopy(dict(body)))

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Document:
        self._called("patch", kind, name)
        stored = self.objects.get((kind.name, namespace, name))
        if stored is None:
            raise ApiError("patch", 404, "NotFound", "gone")
        metadata = patch.get("metadata", {})
        for precondition in ("resourceVersion", "uid"):
            if metadata.get(precondition) not in (None, stored["metadata"].get(precondition)):
                raise ApiError("patch", 409, "Conflict", "changed")
        for field in ("annotations", "labels"):
            for key, value in metadata.get(field, {}).items():
                values = stored["metadata"].setdefault(field, {})
                values.pop(key, None)
                if value is not None:
                    values[key] = value
        part = patch.get("status", {}) if subresource == "status" else {}
        stored["status"] = {**stored.get("status", {}), **part}
        return self.put(kind, stored)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, force: bool = False) -> Document:
        self._called("delete", kind, name)
        self.deletes.append((kind.name, name, uid, force))
        stored = self.objects.get((kind.name, namespace, name))
        if stored is None:
            raise ApiError("delete", 404, "NotFound", "gone")
        if uid and stored["metadata"]["uid"] != uid:
            raise ApiError("delete", 409, "Conflict", "another UID")
        if self.deletes_slowly:
            stored["metadata"]["deletionTimestamp"] = "2026-01-02T03:05:00Z"
            return self.put(kind, stored)
        del self.objects[kind.name, namespace, name]
        return {"kind": "Status", "status": "Success"}

    def _called(self, verb: str, kind: Kind, name: str) -> None:
        self.calls.append((verb, kind.name, name))
        if self.fail.get(verb):
            raise self.fail[verb].pop(0)


def _is_selected(document: Document, selectors: Mapping[str, str | None]) -> bool:
    labels = document["metadata"].get("labels") or {} if document.get("metadata") else {}
    for term in (selectors.get("label_selector") or "").split(","):
        if term and labels.get(term.partition("=")[0]) != term.partition("=")[2]:
            return False
    for term in (selectors.get("field_selector") or "").split(","):
        path, _, wanted = term.partition("=")
        value: Any = document
        for step in path.rstrip("!").split("."):
            value = value.get(step, "") if isinstance(value, dict) else ""
        if term and (value == wanted) == path.endswith("!"):
            return False
    return True


class FakeLeases:
    """One Lease, as the API server keeps it. `unreachable`: every request fails."""

    def __init__(self) -> None:
        self.lease: Document | None = None
        self.unreachable = False
        self._version = 0

    @property
    def holder(self) -> str:
        """Who holds it."""
        return "" if self.lease is None else str(self.lease["spec"].get("holderIdentity") or "")

    async def read(self) -> Document | None:
        self._reach()
        return copy.deepcopy(self.lease)

    async def create(self, spec: Document) -> Document:
        self._reach()
        if self.lease is not None:
            raise ApiError("create", 409, "AlreadyExists", "taken")
        return self._store({"metadata": {}, "spec": spec})

    async def replace(self, lease: Document) -> Document:
        self._reach()
        if self.lease is None or lease["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError("replace", 409, "Conflict", "changed")
        return self._store(lease)

    def _store(self, lease: Document) -> Document:
        self._version += 1
        self.lease = copy.deepcopy({**lease, "metadata": {"resourceVersion": str(self._version)}})
        return copy.deepcopy(self.lease)

    def _reach(self) -> None:
        if self.unreachable:
            raise ApiUnreachableError("no answer")

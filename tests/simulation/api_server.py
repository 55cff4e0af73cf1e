"""A Kubernetes API server in memory: storage, preconditions, deletion with finalizers, quotas, namespaces that end, selectors.

Objects are replaced and never changed in place, so the holder of one has a snapshot. `changes` is the history that watches are
fed from.
"""

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from finetune_operator.client.kinds import (
    BATCH_JOBS,
    CLAIMS,
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    PROFILES,
    SERVICES,
    Kind,
)
from tests.simulation.virtual_time import stamp

Document = dict[str, Any]
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
KINDS = (PROFILES, JOBS, BATCH_JOBS, PODS, CONFIG_MAPS, SERVICES, CLAIMS, NETWORK_POLICIES, EVENTS)


class RefusedError(Exception):
    """The server's answer to a request that it does not carry out."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Change:
    """One change of one object."""

    version: int
    kind: Kind
    before: Document | None
    after: Document | None
    """None: it was removed."""
    by_operator: bool = False


@dataclass
class ApiServer:
    """The store and its rules. `watchers` are told of every change, in order."""

    now: Callable[[], datetime]
    random: random.Random
    objects: dict[Kind, dict[tuple[str, str], Document]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    uid_index: dict[str, tuple[Kind, Document]] = field(default_factory=dict)
    version: int = 0
    uids: int = 0
    quotas: dict[str, set[Kind]] = field(default_factory=dict)
    """Namespace -> kinds of which no more may be created."""
    terminating: set[str] = field(default_factory=set)
    removed_namespaces: set[str] = field(default_factory=set)
    has_queue: bool = False
    """Whether a queue's webhook suspends every Job that carries its label."""
    watchers: list[Callable[[Change], None]] = field(default_factory=list)
    by_operator: bool = False
    """Whether the request in progress is the operator's."""
    refuses: Callable[[str, Kind, str], RefusedError | None] = lambda *_: None
    """What a webhook or a missing right answers to a request of the operator, by its HTTP method, kind and name."""

    # Reading.

    def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        return self.objects[kind].get((namespace if kind.namespaced else "", name))

    def all(self, kind: Kind, namespace: str | None = None) -> list[Document]:
        return [item for (place, _), item in self.objects[kind].items() if namespace is None or place == namespace]

    def by_uid(self, kind: Kind, uid: str) -> Document | None:
        found = self.uid_index.get(uid)
        return found[1] if found is not None and found[0] is kind else None

    def exists(self, uid: str) -> bool:
        return uid in self.uid_index

    def dependents(self, uid: str) -> list[tuple[Kind, Document]]:
        return [
            (kind, item)
            for kind in KINDS
            for item in self.objects[kind].values()
            if any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences") or ())
        ]

    # Writing.

    def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Document:
        document = copy.deepcopy(dict(body))
        metadata = document["metadata"]
        namespace = namespace if kind.namespaced else ""
        if namespace in self.removed_namespaces:
            raise RefusedError(404, "NotFound", f'namespaces "{namespace}" not found')
        if namespace in self.terminating:
            raise RefusedError(403, "Forbidden", f"unable to create new content in namespace {namespace}: it is being terminated")
        if (namespace, metadata["name"]) in self.objects[kind]:
            raise RefusedError(409, "AlreadyExists", f'{kind.plural} "{metadata["name"]}" already exists')
        if kind in self.quotas.get(namespace, ()):
            name = metadata["name"]
            raise RefusedError(403, "Forbidden", f'{kind.plural} "{name}" is forbidden: exceeded quota: compute, limited: 0')
        self.uids += 1
        metadata |= {
            "uid": f"{self.uids:08d}-0000-4000-8000-000000000000",
            "creationTimestamp": stamp(self.now()),
            "generation": 1,
        }
        if namespace:
            metadata["namespace"] = namespace
        if kind == BATCH_JOBS:
            document["status"] = {}
            if self.has_queue and "kueue.x-k8s.io/queue-name" in (metadata.get("labels") or {}):
                document["spec"]["suspend"] = True
        document = {"apiVersion": kind.api_version, "kind": kind.name, **document}
        return self._store(kind, None, document)

    def update(self, kind: Kind, document: Document, change: Callable[[Document], None]) -> Document:
        """Change an object; nothing happens where the change changes nothing. Its generation grows with its spec."""
        metadata = document["metadata"]
        current = self.get(kind, metadata.get("namespace", ""), metadata["name"])
        if current is None or current["metadata"]["uid"] != metadata["uid"]:
            raise RefusedError(404, "NotFound", f'{kind.plural} "{metadata["name"]}" not found')
        after = copy.deepcopy(current)
        change(after)
        if after == current:
            return current
        if after.get("spec") != current.get("spec"):
            after["metadata"]["generation"] = current["metadata"].get("generation", 1) + 1
        return self._store(kind, current, after)

    def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Document:
        """Write an object whole, under the preconditions that it carries."""
        current = self._existing(kind, namespace, name)
        self._check(current, body["metadata"])
        return self.update(kind, current, lambda item: item.update({**body, "metadata": current["metadata"]}))

    def patch_status(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Document:
        """JSON merge patch of the status subresource: whatever else is in the patch is ignored."""
        current = self._existing(kind, namespace, name)
        self._check(current, patch.get("metadata") or {})
        after = dict(current)
        after["status"] = merged(current.get("status") or {}, patch.get("status") or {})
        return current if after == current else self._store(kind, current, after)

    def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Document:
        """JSON merge patch of everything but the status of kinds that have that as a subresource."""
        current = self._existing(kind, namespace, name)
        self._check(current, patch.get("metadata") or {})
        after = merged(current, patch)
        if kind == JOBS and "status" in current:
            after["status"] = current["status"]
        return self.update(kind, current, lambda item: item.update(after))

    def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        version: str = "",
        policy: str | None = None,
        grace: int | None = None,
    ) -> Document | None:
        """Returns the object where it is still there, with its deletion requested; None where it is gone.

        What the policy is where none is given: orphan for Jobs, background for everything else.
        """
        current = self._existing(kind, namespace, name)
        self._check(current, {"uid": uid, "resourceVersion": version})
        policy = policy or ("Orphan" if kind == BATCH_JOBS else "Background")
        if kind == PODS:
            self._delete_pod(current, grace)
            return self.get(kind, namespace, name)
        wanted = {"Foreground": {FOREGROUND}, "Orphan": {ORPHAN}}.get(policy, set())

        def mark(item: Document) -> None:
            metadata = item["metadata"]
            finalizers = sorted({*(metadata.get("finalizers") or ()), *wanted})
            if finalizers:
                metadata["finalizers"] = finalizers
                metadata.setdefault("deletionTimestamp", stamp(self.now()))

        marked = self.update(kind, current, mark)
        if marked["metadata"].get("finalizers"):
            return marked
        self._remove(kind, marked)
        return None

    def drop_finalizer(self, kind: Kind, document: Document, finalizer: str) -> None:
        """Take a finalizer off; the last one of an object that is being deleted removes it."""

        def change(item: Document) -> None:
            left = [one for one in item["metadata"].get("finalizers") or () if one != finalizer]
            item["metadata"]["finalizers"] = left

        self._finalize(kind, self.update(kind, document, change))

    def kubelet_confirms(self, pod: Document) -> None:
        """The containers of a pod that is being deleted have ended."""

        def change(item: Document) -> None:
            item["metadata"]["deletionGracePeriodSeconds"] = 0

        self._finalize(PODS, self.update(PODS, pod, change))

    def _finalize(self, kind: Kind, document: Document) -> None:
        metadata = document["metadata"]
        waits = metadata.get("finalizers") or (kind == PODS and metadata.get("deletionGracePeriodSeconds", 0))
        if "deletionTimestamp" in metadata and not waits:
            self._remove(kind, document)

    def _delete_pod(self, pod: Document, grace: int | None) -> None:
        seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
        phase = (pod.get("status") or {}).get("phase")
        if not pod["spec"].get("nodeName") or phase in ("Succeeded", "Failed"):
            seconds = 0
        known = pod["metadata"].get("deletionGracePeriodSeconds")
        if known is not None and known <= seconds:
            return

        def change(item: Document) -> None:
            item["metadata"]["deletionTimestamp"] = stamp(self.now() + timedelta(seconds=seconds))
            item["metadata"]["deletionGracePeriodSeconds"] = seconds

        self._finalize(PODS, self.update(PODS, pod, change))

    def _existing(self, kind: Kind, namespace: str, name: str) -> Document:
        current = self.get(kind, namespace, name)
        if current is None:
            raise RefusedError(404, "NotFound", f'{kind.plural} "{name}" not found')
        return current

    def _check(self, current: Document, expected: Mapping[str, Any]) -> None:
        for name, text in (("uid", "UID"), ("resourceVersion", "resourceVersion")):
            if expected.get(name) and expected[name] != current["metadata"][name]:
                raise RefusedError(409, "Conflict", f"the {text} in the precondition does not match the object")

    def _store(self, kind: Kind, before: Document | None, after: Document) -> Document:
        self.version += 1
        after["metadata"] = {**after["metadata"], "resourceVersion": str(self.version)}
        self.objects[kind][after["metadata"].get("namespace", ""), after["metadata"]["name"]] = after
        self.uid_index[after["metadata"]["uid"]] = (kind, after)
        self._tell(Change(self.version, kind, before, after, self.by_operator))
        return after

    def _remove(self, kind: Kind, document: Document) -> None:
        metadata = document["metadata"]
        if self.objects[kind].pop((metadata.get("namespace", ""), metadata["name"]), None) is None:
            return
        del self.uid_index[metadata["uid"]]
        self.version += 1
        last = {**document, "metadata": {**metadata, "resourceVersion": str(self.version)}}
        self._tell(Change(self.version, kind, last, None, self.by_operator))

    def _tell(self, change: Change) -> None:
        for watcher in self.watchers:
            watcher(change)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def labels_match(document: Mapping[str, Any], selector: str) -> bool:
    """Equality-based label selectors, joined by commas."""
    labels = document["metadata"].get("labels") or {}
    return _all_match(selector, labels.get)


def fields_match(document: Mapping[str, Any], selector: str) -> bool:
    """Field selectors, joined by commas."""

    def value(path: str) -> str | None:
        here: Any = document
        for part in path.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        return None if here is None else str(here)

    return _all_match(selector, lambda path: value(path) or "")


def _all_match(selector: str, value: Callable[[str], str | None]) -> bool:
    for term in filter(None, selector.split(",")):
        if "!=" in term:
            name, _, wanted = term.partition("!=")
            if value(name) == wanted:
                return False
        elif "=" in term:
            name, _, wanted = term.replace("==", "=").partition("=")
            if value(name) != wanted:
                return False
        elif value(term) is None:
            return False
    return True


def owned_by(documents: Iterable[Document], uid: str) -> list[Document]:
    """Those whose controller owner has that UID."""
    return [
        item
        for item in documents
        if any(owner["uid"] == uid and owner.get("controller") for owner in item["metadata"].get("ownerReferences") or ())
    ]

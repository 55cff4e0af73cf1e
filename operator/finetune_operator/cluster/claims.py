"""Two releases in one cluster must not serve the same namespace: each would undo the other's work.

Every release keeps a Lease, its claim, in one namespace that all releases of the cluster share and that no tenant may write to. Its
annotation names the namespaces that the release serves. A leader first writes its claim and then reads the others', so of two that
come at the same time at least one sees the other, and whoever sees another's living claim to the same namespace withdraws.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

Document = dict[str, Any]
CLAIM_LABEL = "finetune.dev/claim"
NAMESPACES_ANNOTATION = "finetune.dev/namespaces"
EVERYWHERE = "*"
LONGEST_LIST = 3
"""Namespaces that a message names."""


def claim_name(release: str) -> str:
    """Name of a release's claim; `release`: namespace and name of its Lease, with a slash."""
    return f"finetune-operator.{release.replace('/', '.')}"


def claim_metadata(namespaces: tuple[str, ...]) -> Document:
    """Labels and annotations of a claim; no namespaces: all."""
    return {"labels": {CLAIM_LABEL: "true"}, "annotations": {NAMESPACES_ANNOTATION: ",".join(namespaces) or EVERYWHERE}}


class Rivals:
    """Other releases that serve a namespace of ours."""

    def __init__(
        self,
        read_claims: Callable[[], Awaitable[list[Document]]],
        release: str,
        namespaces: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_claims = read_claims
        self._release = release
        self._namespaces = namespaces
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}
        """By name: the last record of a claim and when it was first seen. Others' clocks are not trusted."""

    async def find(self) -> str:
        """Why we must not serve, or nothing. A claim counts as living until it has not changed here for its duration."""
        claims = {str(claim["metadata"]["name"]): claim for claim in await self._read_claims()}
        self._seen = {name: seen for name, seen in self._seen.items() if name in claims}
        # Each is looked at each time, so that the time since its last change is known.
        living = [name for name, claim in sorted(claims.items()) if self._is_living(name, claim)]
        for name in living:
            shared = _shared(self._namespaces, _namespaces(claims[name]))
            if shared and name != claim_name(self._release):
                holder = claims[name]["spec"]["holderIdentity"]
                return (
                    f"release {holder} serves {shared} already (claim {name}), and two releases must not serve the same namespace: "
                    "uninstall one of them, or give each its own list of namespaces"
                )
        return ""

    def _is_living(self, name: str, claim: Document) -> bool:
        spec = claim.get("spec") or {}
        if not spec.get("holderIdentity"):
            return False
        record = (spec.get("renewTime"), spec.get("leaseTransitions"), claim["metadata"].get("resourceVersion"))
        now = self._clock()
        if name not in self._seen or self._seen[name][0] != record:
            self._seen[name] = (record, now)
        return now - self._seen[name][1] < float(spec.get("leaseDurationSeconds") or 0)


def _namespaces(claim: Document) -> tuple[str, ...]:
    """What a claim names; nothing that can be read: all."""
    text = str((claim["metadata"].get("annotations") or {}).get(NAMESPACES_ANNOTATION) or EVERYWHERE)
    return () if text == EVERYWHERE else tuple(text.split(","))


def _shared(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """In words: namespaces of both, or nothing."""
    if not ours and not theirs:
        return "all namespaces"
    shared = sorted(set(ours) & set(theirs)) if ours and theirs else list(ours or theirs)
    more = f" and {len(shared) - LONGEST_LIST} more" if len(shared) > LONGEST_LIST else ""
    return f"namespace {', '.join(shared[:LONGEST_LIST])}{more}" if shared else ""

"""Watches of the children of all jobs: four events of five are theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from finetune_operator.cluster.api import Api
from finetune_operator.cluster.kinds import CHILDREN, CHILDREN_SELECTOR, Kind
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.cluster.relist import scopes
from finetune_operator.cluster.stream_watch import Sleep, StreamWatch

LONGEST_LINE = 4 << 20
"""Twice what an object in etcd may have."""
ReadObject = Callable[[Kind, Any], CachedObject | None]
"""What is kept of an object; None for a stranger's."""
WatchSink = Callable[[Kind, bool, CachedObject], None]
"""Called with the kind, whether the object was deleted, and its state."""


class ChildWatch:
    """`begun_anew` is called when deletions may have been missed."""

    def __init__(
        self,
        api: Api,
        namespaces: tuple[str, ...],
        read: ReadObject,
        sink: WatchSink,
        *,
        begun_anew: Callable[[], None],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._read = read
        self._sink = sink
        self._heard = {kind.name: time.monotonic() for kind in CHILDREN}
        self._watches = {
            (kind, namespace): StreamWatch(
                api,
                kind,
                namespace,
                {"labelSelector": CHILDREN_SELECTOR},
                partial(self._on_event, kind),
                LONGEST_LINE,
                begun_anew=begun_anew,
                sleep=sleep,
            )
            for kind in CHILDREN
            for namespace in scopes(kind, namespaces)
        }

    def begin_from(self, kind: Kind, namespace: str | None, version: str) -> None:
        """A complete list at that version has been taken in: the watch begins after it."""
        watch = self._watches.get((kind, namespace))
        if watch is not None:
            watch.version = version

    def ages(self) -> dict[str, float]:
        """Seconds since an event of each kind came."""
        now = time.monotonic()
        return {name: now - heard for name, heard in list(self._heard.items())}

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watch in self._watches.values():
                group.create_task(watch.run())

    def _on_event(self, kind: Kind, said: str, document: Any) -> None:
        self._heard[kind.name] = time.monotonic()
        held = self._read(kind, document)
        if held is not None:
            self._sink(kind, said == "DELETED", held)

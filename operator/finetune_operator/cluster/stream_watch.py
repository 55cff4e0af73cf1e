"""Watches of numerous objects, children and Warning events. A watch is continued after each end, and begun again if the server
has forgotten too much.

Each event costs several times less than in kopf's watches, which keep a task and a record for every object. kopf watches what
users write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.api import Api
from finetune_operator.cluster.kinds import CHILDREN, CHILDREN_SELECTOR, EVENTS, Kind
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.cluster.raw_objects import Fields, read_json
from finetune_operator.cluster.relist import scopes
from finetune_operator.logs import logger

_log = logger(__name__)
WATCH_SECONDS = 240
"""Seconds after which the server ends a watch, which is then continued: a silent failure lasts no longer than this."""
SILENCE_SECONDS = WATCH_SECONDS + 30.0
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
MOST_AT_ONCE = 50
"""Events that are taken in without letting anything else run: some milliseconds."""
GONE = 410
Sleep = Callable[[float], Awaitable[None]]
LONGEST_CHILD_LINE = 4 << 20
"""Longest event of a child in bytes: more than twice what an object in etcd may have."""
WARNINGS_SELECTOR = "type=Warning"
LONGEST_EVENT_LINE = 1 << 18


def seconds_since(heard: Mapping[str, float]) -> dict[str, float]:
    """Return how many seconds ago each name was heard of. heard: times of time.monotonic; another thread may write to it."""
    now = time.monotonic()
    return {name: now - at for name, at in list(heard.items())}


@dataclass
class StreamWatch:
    """Watches a kind in a namespace (None: everywhere)."""

    api: Api
    kind: Kind
    namespace: str | None
    query: Mapping[str, str]
    """Selectors of the watch."""
    take: Callable[[str, Any], None]
    """Called in the loop with what has happened (ADDED, MODIFIED, DELETED) and the object, whatever that is."""
    longest_line: int
    """Longest event in bytes. A longer one is left out: somebody has filled it up."""
    version: str = ""
    """resourceVersion to begin from; without one the server begins with all existing objects."""
    begun_anew: Callable[[], None] = lambda: None
    """Called when deletions may have been missed."""
    sleep: Sleep = field(default=asyncio.sleep)

    async def run(self) -> None:
        """Watch until cancelled; whatever goes wrong, it begins again after a pause."""
        pause = FIRST_PAUSE
        while True:
            try:
                ended_well = await self._watch()
                pause = FIRST_PAUSE if ended_well else min(2 * pause, LONGEST_PAUSE)
            except (ApiError, ApiUnreachableError) as error:
                _log.warning("watch failed", kind=self.kind.name, namespace=self.namespace, error=str(error), pause_seconds=pause)
                if isinstance(error, ApiError):
                    self._begin_anew()
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception:  # noqa: BLE001 - whatever it is, the objects have to be watched
                _log.exception("watch failed unexpectedly", kind=self.kind.name, namespace=self.namespace)
                self._begin_anew()
                pause = LONGEST_PAUSE
            await self.sleep(pause)

    def _take(self, event_type: str, document: Any) -> None:
        try:
            self.take(event_type, document)
        except Exception:  # noqa: BLE001 - one object must not keep all others from being seen
            _log.exception("event could not be taken in", kind=self.kind.name, namespace=self.namespace)

    def _begin_anew(self) -> None:
        self.version = ""
        self.begun_anew()

    async def _watch(self) -> bool:
        """Make one watch request. Returns whether it ended normally."""
        query = {**self.query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        if self.version:
            query["resourceVersion"] = self.version
        number = 0
        async for line in lines(self.api.stream(self.kind.path(self.namespace), query, SILENCE_SECONDS), self.longest_line):
            try:
                notice = Fields(read_json(line))
            except (ValueError, RecursionError):
                continue
            event_type, fields = notice.text("type", 16), notice.at("object")
            if event_type == "ERROR":
                code = fields.integer("code")
                if code != GONE:
                    _log.warning("watch failed", kind=self.kind.name, code=code, error=fields.text("message", 256))
                self._begin_anew()
                return code == GONE
            self.version = fields.at("metadata").name("resourceVersion") or self.version
            if event_type in ("ADDED", "MODIFIED", "DELETED"):
                self._take(event_type, fields.raw)
            number += 1
            if number % MOST_AT_ONCE == 0:
                await asyncio.sleep(0)
        return True


async def lines(chunks: AsyncIterator[bytes], longest: int) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, without those that are too long."""
    pending, is_too_long = bytearray(), False
    async for chunk in chunks:
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            if not is_too_long and len(pending) + len(part) <= longest:
                yield bytes(pending + part)
            pending.clear()
            is_too_long = False
        is_too_long |= len(pending) + len(rest) > longest
        if is_too_long:
            pending.clear()
        else:
            pending += rest


ReadObject = Callable[[Kind, Any], CachedObject | None]
"""Returns what is kept of an object; None if it is not ours."""
WatchSink = Callable[[Kind, bool, CachedObject], None]
"""Called with the kind, whether the object was deleted, and its state."""


class ChildWatch:
    """Watches the children of jobs. `begun_anew` is called when deletions may have been missed."""

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
                LONGEST_CHILD_LINE,
                begun_anew=begun_anew,
                sleep=sleep,
            )
            for kind in CHILDREN
            for namespace in scopes(kind, namespaces)
        }

    def begin_from(self, kind: Kind, namespace: str | None, version: str) -> None:
        """Begin the watch after a complete list at that version, which has been taken in."""
        watch = self._watches.get((kind, namespace))
        if watch is not None:
            watch.version = version

    def ages(self) -> dict[str, float]:
        """Seconds since an event of each kind came."""
        return seconds_since(self._heard)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watch in self._watches.values():
                group.create_task(watch.run())

    def _on_event(self, kind: Kind, event_type: str, document: Any) -> None:
        self._heard[kind.name] = time.monotonic()
        cached = self._read(kind, document)
        if cached is not None:
            self._sink(kind, event_type == "DELETED", cached)


class EventWatch:
    """Watches Warning events. `take` is called in the loop with every one of the served namespaces."""

    def __init__(self, api: Api, namespaces: tuple[str, ...], take: Callable[[Any], None], sleep: Sleep = asyncio.sleep) -> None:
        self._api = api
        self._namespaces = namespaces
        self._take = take
        self._sleep = sleep

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for namespace in scopes(EVENTS, self._namespaces):
                watch = StreamWatch(
                    self._api,
                    EVENTS,
                    namespace,
                    {"fieldSelector": WARNINGS_SELECTOR},
                    self._on_event,
                    LONGEST_EVENT_LINE,
                    sleep=self._sleep,
                )
                group.create_task(watch.run())

    def _on_event(self, event_type: str, event: Any) -> None:
        if event_type != "DELETED":
            self._take(event)

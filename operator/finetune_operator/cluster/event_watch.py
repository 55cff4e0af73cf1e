"""One watch of all Warning events, in the place of a list of events for every pod that waits.

Not kopf's: it would keep a record of every event of every stranger, and an event is worth nothing once it was looked at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from finetune_operator.cluster.api import Api
from finetune_operator.cluster.errors import ApiError, ApiUnreachableError
from finetune_operator.cluster.fields import Fields
from finetune_operator.cluster.kinds import EVENTS
from finetune_operator.cluster.relist import scopes
from finetune_operator.logs import logger

_log = logger(__name__)
SELECTOR = "type=Warning"
WATCH_SECONDS = 240
"""After so long the server ends a watch, and it is continued from where it was: no silence is taken for health for longer."""
SILENCE_SECONDS = WATCH_SECONDS + 30.0
LONGEST_LINE = 1 << 18
"""Bytes of one event. A longer one is left out: somebody has filled it up."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
GONE = 410


class EventWatch:
    """`take` is called in the loop with every Warning event of the served namespaces."""

    def __init__(
        self,
        api: Api,
        namespaces: tuple[str, ...],
        take: Callable[[Any], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._namespaces = namespaces
        self._take = take
        self._sleep = sleep

    async def run(self) -> None:
        """Watch until cancelled; whatever goes wrong, it begins again after a pause."""
        async with asyncio.TaskGroup() as group:
            for namespace in scopes(EVENTS, self._namespaces):
                group.create_task(self._keep_watching(namespace))

    async def _keep_watching(self, namespace: str | None) -> None:
        version, pause = "", FIRST_PAUSE
        while True:
            try:
                version, ended_well = await self._watch(namespace, version)
                pause = FIRST_PAUSE if ended_well else min(2 * pause, LONGEST_PAUSE)
            except (ApiError, ApiUnreachableError) as error:
                _log.warning("watch of events failed", namespace=namespace, error=str(error), pause_seconds=pause)
                version = "" if isinstance(error, ApiError) else version
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception:  # noqa: BLE001 - reasons of waiting are a help, and no reason to end
                _log.exception("watch of events failed unexpectedly", namespace=namespace)
                version, pause = "", LONGEST_PAUSE
            await self._sleep(pause)

    async def _watch(self, namespace: str | None, version: str) -> tuple[str, bool]:
        """One request. Returns from where to go on, and whether it ended as watches do.

        Without a version the server begins with everything that there is.
        """
        query = {"watch": "true", "fieldSelector": SELECTOR, "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        if version:
            query["resourceVersion"] = version
        async for line in _lines(self._api.stream(EVENTS.path(namespace), query, SILENCE_SECONDS)):
            try:
                notice = Fields(json.loads(line))
            except (ValueError, RecursionError):
                continue
            said, shown = notice.text("type", 16), notice.at("object")
            if said == "ERROR":
                code = shown.integer("code")
                if code != GONE:
                    _log.warning("watch of events failed", namespace=namespace, code=code, error=shown.text("message", 256))
                return "", code == GONE
            version = shown.at("metadata").name("resourceVersion") or version
            if said in ("ADDED", "MODIFIED"):
                self._take(shown.raw)
        return version, True


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of a stream, without those that are too long to hold."""
    held, is_too_long = bytearray(), False
    async for chunk in chunks:
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            if not is_too_long and len(held) + len(part) <= LONGEST_LINE:
                yield bytes(held + part)
            held.clear()
            is_too_long = False
        is_too_long |= len(held) + len(rest) > LONGEST_LINE
        if is_too_long:
            held.clear()
        else:
            held += rest

"""One watch of all Warning events, in the place of a list of events for every pod that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from finetune_operator.cluster.api import Api
from finetune_operator.cluster.kinds import EVENTS
from finetune_operator.cluster.relist import scopes
from finetune_operator.cluster.stream_watch import Sleep, StreamWatch

SELECTOR = "type=Warning"
LONGEST_LINE = 1 << 18


class EventWatch:
    """`take` is called in the loop with every Warning event of the served namespaces."""

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
                    self._api, EVENTS, namespace, {"fieldSelector": SELECTOR}, self._on_event, LONGEST_LINE, sleep=self._sleep
                )
                group.create_task(watch.run())

    def _on_event(self, said: str, event: Any) -> None:
        if said != "DELETED":
            self._take(event)

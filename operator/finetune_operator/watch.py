"""kopf's watches, in a thread of their own: every event becomes a projection and is handed to the main loop.

Their own thread and loop, because kopf stalls its loop for seconds in a burst of objects, installs signal handlers where it
runs in the main thread, and cancels every task of its loop when it ends. kopf is used for nothing else: no finalizers, no
annotations, no handlers with state. It ends on errors that it cannot handle; then the process ends too, and restarts cheaply.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import kopf
from kopf._cogs.structs.references import Insights

from finetune_operator.cluster.access import connection_for_kopf
from finetune_operator.cluster.kinds import WATCHED, Kind, selector_of
from finetune_operator.cluster.projection import Held
from finetune_operator.logs import logger

_log = logger(__name__)
ReadObject = Callable[[Kind, Any], Held | None]
"""Called in the watch thread."""
WatchSink = Callable[[Kind, bool, Held], None]
"""Called in the main loop with the kind, whether the object was deleted, and its state."""

REQUEST_TIMEOUT_SECONDS = 30.0
ERROR_BACKOFFS = (0.5, 1, 2, 4, 8)
WORKER_LIMIT = 100
"""Objects that kopf handles at a time; more makes its loop stall for longer in a burst."""
IDLE_SECONDS = 0.1
"""How long a worker waits for another event of its object. Throughput from cold is limit / idle, so this is short."""
PAGE_SIZE = 500
SCAN_SECONDS = 120.0
"""How long kopf's one look at the served resources may take."""


class ResourcesNotWatchedError(Exception):
    """kopf did not find a resource that is to be watched. It would stay silent for ever, so the process must end."""


class Watches:
    """Runs kopf until `stop`. `ended` is set in the main loop when the thread ends for whatever reason."""

    def __init__(self, namespaces: tuple[str, ...], read: ReadObject, sink: WatchSink) -> None:
        self._namespaces = namespaces
        self._read = read
        self._sink = sink
        self._main = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.ended = asyncio.Event()
        self.failure: BaseException | None = None
        """Why it ended, if not because of `stop`."""

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    async def stop(self) -> None:
        """Ask kopf to end and wait for its thread."""
        if self._loop is not None and self._stop is not None:
            # It may have ended by itself between any check here and the call.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, 15.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except BaseException as error:  # noqa: BLE001 - told to the main loop, which ends the process
            self.failure = error
            _log.error("watches failed", error=repr(error))
        finally:
            self._main.call_soon_threadsafe(self.ended.set)

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        insights = Insights()
        check = asyncio.create_task(self._check_resources(insights, self._stop))
        await kopf.operator(
            registry=self._registry(),
            settings=_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
            insights=insights,
        )
        if check.done():
            check.result()
        else:
            check.cancel()

    async def _check_resources(self, insights: Insights, stop: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(SCAN_SECONDS):
                await insights.ready_resources.wait()
            found = {(resource.group, resource.version, resource.plural) for resource in insights.watched_resources}
            missing = [kind.plural for kind in WATCHED if (kind.group, kind.version, kind.plural) not in found]
            if missing:
                names = ", ".join(missing)
                raise ResourcesNotWatchedError(f"the API server does not list {names} any more: are the CRDs installed?")
        except BaseException:
            stop.set()
            raise

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.ConnectionInfo:
            return await connection_for_kopf()

        kopf.on.login(registry=registry)(login)
        for kind in WATCHED:
            kopf.on.event(kind.group, kind.version, kind.plural, id="watch", registry=registry)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def on_event(event: dict[str, Any], **_: Any) -> None:
            held = self._read(kind, event["object"])
            if held is not None:
                self._main.call_soon_threadsafe(self._sink, kind, event["type"] == "DELETED", held)

        return on_event


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    settings.networking.error_backoffs = ERROR_BACKOFFS
    settings.queueing.worker_limit = WORKER_LIMIT
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.watching.chunk_size = PAGE_SIZE
    settings.process.ultimate_exiting_timeout = None
    for kind in WATCHED:
        selector = selector_of(kind)
        if selector is not None:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return settings

"""Runs kopf's watches of all kinds in a separate thread, and passes every event unchanged to the main loop.

They have their own thread and loop because kopf stalls its loop for seconds during a burst of objects, installs signal handlers
if it runs in the main thread, and cancels all tasks of its loop when it ends. kopf is used for nothing else: no finalizers, no
annotations, no handlers with state. kopf ends on errors that it cannot handle, such as an ERROR event; it is then restarted in
the same thread. After a restart, or after a watch has expired, the cache is compared with the API server to find what was missed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from typing import Any

import kopf
from yarl import URL

from finetune_operator.cache.relist import scopes
from finetune_operator.client.access import session_for_kopf
from finetune_operator.client.api import PAGE_SIZE
from finetune_operator.client.kinds import CHILDREN, CHILDREN_SELECTOR, EVENTS, WARNINGS_SELECTOR, WATCHED, Kind
from finetune_operator.logs import logger


class NoStorage(kopf.DiffBaseStorage, kopf.ProgressStorage):  # type: ignore[misc]
    """A storage that keeps nothing and writes nothing into objects. kopf's own storages would write the last state of an object
    and the progress of handlers into annotations, neither of which our handlers need.
    """

    def build(self, **_: Any) -> Any:
        """Return an empty essence, so that all objects look the same to kopf."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Return None, because there is no last state and no progress."""
        return None

    def store(self, **_: Any) -> None:
        """Keep nothing."""

    def purge(self, **_: Any) -> None:
        """Do nothing, because nothing is kept."""

    def touch(self, **_: Any) -> None:
        """Write nothing into the object."""

    def clear(self, *, essence: Any) -> Any:
        """Return the object as it is, because nothing was written into it."""
        return essence


_log = logger(__name__)
REQUEST_TIMEOUT_SECONDS = 30.0
WORKER_LIMIT = 100
"""Number of objects that kopf handles concurrently; a higher limit would stall its loop for longer during a burst."""
IDLE_SECONDS = 0.1
"""How long a worker waits for further events of its object. It is short, because it limits the rate of handling new objects."""
HAND_OVER_SECONDS = 0.01
"""How long events are collected before they are passed on, because waking the main loop for each would cost a thread switch."""
MOST_AT_ONCE = 50
"""Maximum number of events that the main loop processes before it does other work; they take a few milliseconds."""
SILENCE_SECONDS = 120.0
"""How long kopf may take after its start to request every kind."""
ENDING_SECONDS = 2.0
"""How long kopf's tasks may take to end."""
RESTART_FIRST = 1.0
RESTART_LONGEST = 30.0
"""First and longest pause before kopf is restarted. The pause doubles if kopf ran for less than the longest pause."""


Sink = Callable[[Kind, bool, Any], None]
"""Called with the kind, whether the object was deleted, and the object."""


class NotWatchedError(Exception):
    """kopf does not watch an expected kind. With scanning disabled, it looks for kinds only once, so it never will."""


class ErrorBackoffs:
    """An endless sequence of pauses between kopf's attempts at a request: an unavailable API server will come back."""

    def __iter__(self) -> Iterator[float]:
        pause = 0.5
        while True:
            yield pause
            pause = min(2 * pause, 8.0)


class Watches:
    """Runs kopf until `stop`. `sink` is called in the main loop.

    `ended` is set in the main loop when the thread ends for any reason.
    """

    def __init__(self, namespaces: tuple[str, ...], sink: Sink) -> None:
        self._namespaces = namespaces
        self._sink = sink
        self._main = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.ended = asyncio.Event()
        self.restarted = asyncio.Event()
        """Set in the main loop whenever kopf or one of its watches was restarted, because deletions may have been missed. The
        main loop clears it."""
        self.num_restarts = 0
        self._heard = {kind.name: time.monotonic() for kind in WATCHED}
        self._inbox: deque[tuple[Kind, bool, Any]] = deque()
        """Events for the main loop: kopf's thread appends them, and the main loop removes them."""

    def ages(self) -> dict[str, float]:
        """Name of each kind -> seconds since its last event."""
        now = time.monotonic()
        return {name: now - at for name, at in list(self._heard.items())}

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    async def stop(self) -> None:
        """Ask kopf to end and wait for its thread."""
        self._is_stopped.set()
        if self._loop is not None and self._stop is not None:
            # If the loop closes between the checks above and this call, the call raises RuntimeError.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, 15.0)

    def _run(self) -> None:
        pause = RESTART_FIRST
        try:
            while not self._is_stopped.is_set():
                started = time.monotonic()
                try:
                    # Not asyncio.run, which waits for every task to end: kopf's tasks that wait for new credentials do not end
                    # even when cancelled.
                    loop = asyncio.new_event_loop()
                    with closing(loop):
                        loop.run_until_complete(self._watch())
                except Exception as error:  # noqa: BLE001 - whatever it is, the watches have to continue
                    _log.error("watches failed and are started again", error=repr(error), pause_seconds=pause)
                if self._is_stopped.wait(pause):
                    break
                pause = min(2 * pause, RESTART_LONGEST) if time.monotonic() - started < RESTART_LONGEST else RESTART_FIRST
                self.num_restarts += 1
                self._report_restart()
        finally:
            self._main.call_soon_threadsafe(self.ended.set)

    def _report_restart(self) -> None:
        self._main.call_soon_threadsafe(self.restarted.set)

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._is_stopped.is_set():
            return
        expected = {kind.path(namespace) for kind in WATCHED for namespace in scopes(kind, self._namespaces)}
        paths = WatchedPaths(expected, self._report_restart)
        tasks = await kopf.spawn_tasks(
            registry=self._registry(paths.note),
            settings=_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
        )
        ended, _ = await asyncio.wait([*tasks, asyncio.create_task(_check(paths))], return_when=asyncio.FIRST_COMPLETED)
        others = asyncio.all_tasks() - {asyncio.current_task()} - ended
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=ENDING_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.result()

    def _registry(self, on_answer: Callable[[URL, int], None]) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.AiohttpSession:
            return await session_for_kopf(on_answer)

        kopf.on.login(registry=registry)(login)
        for kind in WATCHED:
            kopf.on.event(kind.group, kind.version, kind.plural, id="watch", registry=registry)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def on_event(event: dict[str, Any], **_: Any) -> None:
            self._heard[kind.name] = time.monotonic()
            self._inbox.append((kind, event["type"] == "DELETED", event["object"]))
            if len(self._inbox) == 1:
                loop = asyncio.get_running_loop()
                loop.call_later(HAND_OVER_SECONDS, self._main.call_soon_threadsafe, self._hand_over)

        return on_event

    def _hand_over(self) -> None:
        """Pass on the collected events in order. Runs in the main loop.

        Only an event that enters an empty inbox wakes the loop; later events are passed on along with it.
        """
        try:
            for _ in range(min(len(self._inbox), MOST_AT_ONCE)):
                self._sink(*self._inbox.popleft())
        finally:
            if self._inbox:
                self._main.call_soon(self._hand_over)


class WatchedPaths:
    """Tracks, by the responses to kopf's requests, which of the expected paths kopf has requested and which it lists again."""

    def __init__(self, expected: Iterable[str], listed_again: Callable[[], None]) -> None:
        self.missing = set(expected)
        """Paths that kopf has not requested yet."""
        self._expected = frozenset(expected)
        self._listed_again = listed_again
        self._listed: set[str] = set()

    def note(self, url: URL, status: int) -> None:
        """Record a request that was answered. A second list of a path means that its watch had expired."""
        # The server's address may have a path of its own, which precedes the expected path.
        path = next((path for path in self._expected if url.path.endswith(path)), None)
        if path is None:
            return
        # Even an error counts, because kopf repeats the request until it succeeds.
        self.missing.discard(path)
        if status == 200 and "watch" not in url.query and "continue" not in url.query:
            if path in self._listed:
                self._listed_again()
            self._listed.add(path)


async def _check(paths: WatchedPaths) -> None:
    """Raise NotWatchedError if kopf has not requested every path after `SILENCE_SECONDS`."""
    await asyncio.sleep(SILENCE_SECONDS)
    if paths.missing:
        names = ", ".join(sorted(paths.missing))
        raise NotWatchedError(f"{SILENCE_SECONDS:g} s without a request for {names}: are the CRDs installed?")
    await asyncio.Event().wait()


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    settings.networking.error_backoffs = ErrorBackoffs()
    settings.queueing.worker_limit = WORKER_LIMIT
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.watching.chunk_size = PAGE_SIZE
    for kind in CHILDREN:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = CHILDREN_SELECTOR
    settings.watching.field_selectors[EVENTS.group, EVENTS.version, EVENTS.plural] = WARNINGS_SELECTOR
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.diffbase_storage = settings.persistence.progress_storage = NoStorage()
    return settings

"""kopf's watches of what users write, in a thread of their own: every event becomes a projection for the main loop.

They have their own thread and loop, because kopf stalls its loop for seconds in a burst of objects, installs signal handlers
where it runs in the main thread, and cancels every task of its loop when it ends. kopf is used for nothing else: no finalizers,
no annotations, no handlers with state. It ends on errors that it cannot handle, such as an ERROR event; then it is started
again in the same thread, and the cache is compared with the API server for what was missed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import kopf
from yarl import URL

from finetune_operator.cluster.access import session_for_kopf
from finetune_operator.cluster.api import PAGE_SIZE
from finetune_operator.cluster.kinds import WRITTEN_BY_USERS, Kind
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.cluster.relist import scopes
from finetune_operator.cluster.stream_watch import ReadObject, WatchSink, seconds_since
from finetune_operator.logs import logger


class NoDiffBase(kopf.DiffBaseStorage):  # type: ignore[misc]
    """A store for which every object looks the same."""

    def build(self, **_: Any) -> Any:
        """Nothing of the object matters."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """There is no last state."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""


class NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """A store for handlers without state."""

    def fetch(self, **_: Any) -> Any:
        """There is none."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept."""

    def purge(self, **_: Any) -> None:
        """Nothing is kept."""

    def touch(self, **_: Any) -> None:
        """Nothing is written into any object."""

    def clear(self, *, essence: Any) -> Any:
        """Nothing of ours is in it."""
        return essence


_log = logger(__name__)
REQUEST_TIMEOUT_SECONDS = 30.0
WORKER_LIMIT = 100
"""Objects that kopf handles at a time; more makes its loop stall for longer in a burst."""
IDLE_SECONDS = 0.1
"""How long a worker waits for another event of its object. Throughput from cold is limit / idle, so this is short."""
MOST_AT_ONCE = 200
"""Events that the main loop takes in without doing anything else: some milliseconds."""
SILENCE_SECONDS = 120.0
"""How long a kind may stay unwatched while no list is answered."""
ENDING_SECONDS = 2.0
"""How long kopf's tasks may take to end."""
RESTART_FIRST = 1.0
RESTART_LONGEST = 30.0
"""Pauses before kopf is started again; doubled each time it ends sooner than this."""


class NotWatchedError(Exception):
    """kopf does not watch a kind that it should. With scanning disabled it looks once, and would stay silent forever."""


class ErrorBackoffs:
    """Endless pauses between kopf's tries of one request, because an API server that is away comes back."""

    def __iter__(self) -> Iterator[float]:
        pause = 0.5
        while True:
            yield pause
            pause = min(2 * pause, 8.0)


class Watches:
    """Runs kopf until `stop`: `read` is called in its thread, `sink` in the main loop.

    `ended` is set in the main loop when the thread ends for whatever reason.
    """

    def __init__(self, namespaces: tuple[str, ...], read: ReadObject, sink: WatchSink) -> None:
        self._namespaces = namespaces
        self._read = read
        self._sink = sink
        self._main = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.ended = asyncio.Event()
        self.restarted = asyncio.Event()
        """Set in the main loop after each time that kopf was started again: deletions may have been missed. The main loop
        clears it."""
        self.num_restarts = 0
        self._heard = {kind.name: time.monotonic() for kind in WRITTEN_BY_USERS}
        self._inbox: deque[tuple[Kind, bool, CachedObject]] = deque()
        """Events between kopf's thread, which appends, and the main loop, which takes."""

    def ages(self) -> dict[str, float]:
        """Seconds since an event of each kind came."""
        return seconds_since(self._heard)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    async def stop(self) -> None:
        """Ask kopf to end and wait for its thread."""
        self._is_stopped.set()
        if self._loop is not None and self._stop is not None:
            # It may have ended by itself between any check here and the call.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, 15.0)

    def _run(self) -> None:
        pause = RESTART_FIRST
        try:
            while not self._is_stopped.is_set():
                started = time.monotonic()
                try:
                    self._run_once()
                except Exception as error:  # noqa: BLE001 - whatever it is, the watches have to continue
                    _log.error("watches failed: they are started again", error=repr(error), pause_seconds=pause)
                if self._is_stopped.wait(pause):
                    break
                pause = min(2 * pause, RESTART_LONGEST) if time.monotonic() - started < RESTART_LONGEST else RESTART_FIRST
                self.num_restarts += 1
                self._main.call_soon_threadsafe(self.restarted.set)
        finally:
            self._main.call_soon_threadsafe(self.ended.set)

    def _run_once(self) -> None:
        # Not asyncio.run: it waits for every task, and kopf's wait for new credentials without end, whatever cancels them.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._watch())
        finally:
            loop.close()

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._is_stopped.is_set():
            return
        expected = {kind.path(namespace) for kind in WRITTEN_BY_USERS for namespace in scopes(kind, self._namespaces)}
        answers = WatchedPaths(expected, time.monotonic)
        tasks = await kopf.spawn_tasks(
            registry=self._registry(answers.note),
            settings=_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
        )
        ended, _ = await asyncio.wait([*tasks, asyncio.create_task(_check(answers))], return_when=asyncio.FIRST_COMPLETED)
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
        for kind in WRITTEN_BY_USERS:
            kopf.on.event(kind.group, kind.version, kind.plural, id="watch", registry=registry)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def on_event(event: dict[str, Any], **_: Any) -> None:
            self._heard[kind.name] = time.monotonic()
            cached = self._read(kind, event["object"])
            if cached is not None:
                self._inbox.append((kind, event["type"] == "DELETED", cached))
                if len(self._inbox) == 1:
                    # Waking the main loop costs a system call and a change of threads, so it is done once for all events that are
                    # there then.
                    self._main.call_soon_threadsafe(self._hand_over)

        return on_event

    def _hand_over(self) -> None:
        """Pass on what has come, in its order. Runs in the main loop.

        An event that enters an empty inbox wakes the loop; later ones are handed over after it.
        """
        try:
            for _ in range(min(len(self._inbox), MOST_AT_ONCE)):
                self._sink(*self._inbox.popleft())
        finally:
            if self._inbox:
                self._main.call_soon(self._hand_over)


class WatchedPaths:
    """Tracks which of the expected paths are watched, from the answers of the API server."""

    def __init__(self, expected: set[str], clock: Callable[[], float]) -> None:
        self.missing = set(expected)
        """Paths that no watch has been answered for yet."""
        self._clock = clock
        self._deadline = clock() + SILENCE_SECONDS

    @property
    def seconds_left(self) -> float:
        """Seconds until the missing paths count as paths that will never be watched."""
        return self._deadline - self._clock()

    def note(self, url: URL, status: int) -> None:
        """Note an answered request. A list shows that kopf makes progress, however many objects there are."""
        if status != 200:
            return
        if "watch" in url.query:
            # A server's address may have a path of its own.
            self.missing = {path for path in self.missing if not url.path.endswith(path)}
        elif "limit" in url.query:
            self._deadline = self._clock() + SILENCE_SECONDS


async def _check(answers: WatchedPaths) -> None:
    """Wait, and raise NotWatchedError once it is clear that something will never be watched."""
    while answers.missing:
        await asyncio.sleep(max(answers.seconds_left, 0.0))
        if answers.missing and answers.seconds_left <= 0:
            names = ", ".join(sorted(answers.missing))
            raise NotWatchedError(f"{SILENCE_SECONDS:g} s without a watch of {names}: are the CRDs installed?")
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
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    return settings

"""One life of the operator: its real client, cache, gatherer, executor, queue, workers and relist, wired as `app` wires them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from finetune_job.progress import Progress
from finetune_operator.cache.cache import Cache
from finetune_operator.cache.relist import relist
from finetune_operator.cache.warning_events import WarningEvents
from finetune_operator.client.kinds import CACHED, EVENTS, JobKey, Kind, selector_of
from finetune_operator.passes.execute import Executor
from finetune_operator.passes.gather import Gathered, Gatherer
from finetune_operator.passes.recorder import EventRecorder
from finetune_operator.passes.worker import Worker, urgency
from finetune_operator.queue.workqueue import WorkQueue
from finetune_operator.settings import Rates, Timeouts
from finetune_operator.side_tasks.background import Relisting, keep_trying
from tests.simulation.api_server import ApiServer, Change, Document, labels_match
from tests.simulation.transport import Call, Weather, Wire, simulated_api
from tests.simulation.virtual_time import VirtualLoop

WORKERS = 4
PASSES_PER_SECOND = 15
"""More passes over one job in one second than this are passes without effect or pause."""


@dataclass
class Observer:
    """What the operator does, as its instruments see it. Complaints are read by the driver."""

    complaints: list[str] = field(default_factory=list)
    passes: dict[JobKey, list[float]] = field(default_factory=dict)
    num_passes: int = 0

    def request(self, *_: object) -> None:
        """Counted on the wire."""

    def reconciled(self, *arguments: object, **_: object) -> None:
        self.num_passes += 1
        if "defect" in arguments:
            self.complaints.append("a pass failed unexpectedly: see the log above")

    def found(self, *_: object) -> None:
        """Not looked at."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Instruments that this simulation does not look at."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def began(self, key: JobKey, at: float) -> bool:
        """A pass over a job began. Returns whether it may."""
        recent = [moment for moment in self.passes.get(key, []) if at - moment < 1.0] + [at]
        self.passes[key] = recent
        if len(recent) > PASSES_PER_SECOND:
            self.complaints.append(f"spin: {len(recent)} passes over {key} within a second")
        return len(recent) <= PASSES_PER_SECOND


class _Gatherer(Gatherer):
    """Tells when a pass begins."""

    observer: Observer

    async def gather(self, key: JobKey, now: datetime) -> Gathered | None:
        if not self.observer.began(key, asyncio.get_running_loop().time()):
            # The complaint ends the walk as soon as its driver has its turn.
            await asyncio.Event().wait()
        gathered = await super().gather(key, now)
        # Measured processor time is the one thing here that is not the same each time.
        return None if gathered is None else replace(gathered, cpu_seconds=0.0)


class Watch:
    """The events of one kind on their way to the operator, by object: never out of order within one object's history."""

    def __init__(self, kind: Kind, server: ApiServer) -> None:
        self.kind = kind
        self.pending: dict[str, list[tuple[bool, Document]]] = {}
        self._server = server
        self._selector = selector_of(kind) or ""

    def saw(self, change: Change) -> None:
        """The server has changed an object of this kind. One that loses its labels is reported as deleted."""
        before = change.before is not None and labels_match(change.before, self._selector)
        after = change.after is not None and labels_match(change.after, self._selector)
        if after and change.after is not None:
            self._add(False, change.after)
        elif before and change.before is not None:
            version = str(change.version)
            self._add(True, {**change.before, "metadata": {**change.before["metadata"], "resourceVersion": version}})

    def list_again(self) -> None:
        """The watch broke: what was on its way is lost, deletions for good, and everything that exists is told as new."""
        self.pending.clear()
        for item in self._server.all(self.kind):
            if labels_match(item, self._selector):
                self._add(False, item)

    def take(self, uid: str, *, latest_only: bool) -> list[tuple[bool, Document]]:
        """The events of an object; `latest_only`: those that came close together are one, as kopf has it."""
        events = self.pending.pop(uid, [])
        return events[-1:] if latest_only else events

    def _add(self, deleted: bool, document: Document) -> None:
        self.pending.setdefault(document["metadata"]["uid"], []).append((deleted, document))


class OperatorProcess:
    """Runs until it is killed; after that none of its requests is answered any more."""

    def __init__(
        self, server: ApiServer, weather: Weather, loop: VirtualLoop, on_call: Callable[[Call], None], seed: str
    ) -> None:
        self.observer = Observer()
        self.is_alive = True
        self.is_synced = False
        self.watches = {kind: Watch(kind, server) for kind in CACHED}
        self._loop = loop
        self._wire = Wire(server, weather, random.Random(seed), on_call, self.kill)
        timeouts = Timeouts()
        # Small pages, so that lists break in the middle.
        in_flight = Rates().requests_in_flight
        api = simulated_api(self._wire, page_size=3, most_in_flight=in_flight, clock=lambda: loop.now().timestamp())
        self.cache = Cache(clock=loop.time)
        self.queue: WorkQueue[JobKey] = WorkQueue(retry_first=timeouts.retry_first, retry_longest=timeouts.retry_longest)
        self.cache.lines.turn_has_come = lambda key: self.queue.add(key, urgency(self.cache.job(key)))
        self.warnings = WarningEvents(self.cache)
        draw = random.Random(f"jitter {seed}").random
        self.gatherer = _Gatherer(api, self.cache, timeouts.pending_events_after, self.warnings, draw)
        self.gatherer.observer = self.observer
        recorder = EventRecorder(api, "simulated")
        executor = Executor(api, self.cache, self.gatherer, recorder, now=loop.now)
        worker = Worker(self.queue, self.gatherer, executor, self.observer, loop.now, cpu_clock=lambda: 0.0)
        self._restarted = asyncio.Event()
        relisting = Relisting(
            compare=lambda: relist(api, self.cache, ()),
            job_keys=self.cache.job_keys,
            queue=self.queue,
            first=timeouts.first_relist,
            period=timeouts.relist,
            restarted=self._restarted,
            failed=_unheard,
        )

        async def work() -> None:
            await keep_trying("first list", lambda: relist(api, self.cache, ()), _unheard)
            for watch in self.watches.values():
                watch.list_again()
            for key in self.cache.job_keys():
                self.queue.add(key, urgency(self.cache.job(key)))
            self.is_synced = True
            tasks_by_name = {"relist": relisting.run, "events": recorder.run}
            others = [keep_trying(name, task, _unheard) for name, task in tasks_by_name.items()]
            await asyncio.gather(*others, *(worker.run() for _ in range(WORKERS)))

        self._task = loop.create_task(work())

    def check(self) -> None:
        """Raises what ended the process, if it was not killed."""
        if self.is_alive and self._task.done():
            error = self._task.exception()
            raise AssertionError(f"the operator's process ended by itself: {error!r}") from error

    def kill(self) -> None:
        """SIGKILL: nothing that it began continues, nothing that it remembered is left."""
        self.is_alive = False
        self._wire.dead = True
        # Later, because the call may come out of one of the tasks that are to end.
        self._loop.call_soon(self._task.cancel)

    def saw(self, change: Change) -> None:
        """A change of the server, for the watches."""
        if self.is_alive and self.is_synced and change.kind in self.watches:
            self.watches[change.kind].saw(change)
        elif self.is_alive and change.kind == EVENTS and change.after is not None and change.after.get("type") == "Warning":
            # Hints that come at once or never.
            key = self.warnings.take(change.after)
            if key is not None:
                self.queue.add(key)

    def deliver(self, kind: Kind, uid: str, *, latest_only: bool = False) -> None:
        """Hand the pending events of an object to the cache, as the sink of the watches does."""
        for deleted, document in self.watches[kind].take(uid, latest_only=latest_only):
            concerned = self.cache.take_deleted(kind, document) if deleted else self.cache.take(kind, document)
            for key in sorted(concerned):
                self.queue.add(key, urgency(self.cache.job(key)))

    def deliver_all(self) -> None:
        """Everything that is on its way."""
        for kind, watch in self.watches.items():
            for uid in list(watch.pending):
                self.deliver(kind, uid)

    def restart_watches(self) -> None:
        """kopf ended and was started again: every kind is listed, and a relist is asked for."""
        for watch in self.watches.values():
            watch.list_again()
        self._restarted.set()

    def tell_progress(self, uid: str, key: JobKey, progress: Progress) -> None:
        """What a poll of rank 0 does."""
        self.gatherer.note_progress(uid, progress)
        self.queue.add(key)


def _unheard(_: str) -> None:
    """Failures of what runs next to the workers are expected here: its requests fail."""

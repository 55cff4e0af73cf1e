"""Kubernetes Events on FineTuneJobs. A repeated event raises the count of the first one, as kubectl shows it.

Events are optional: `record` only notes them, and `run` writes them when nothing more important waits. So events never delay a
pass. An event that waits already is counted up and not queued twice; if too many wait, further ones are left out and counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from finetune_job.names import API_VERSION, JOB_KIND, MANAGED_BY
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.kinds import EVENTS
from finetune_operator.cluster.projection import utc_now
from finetune_operator.decide.actions import Emit
from finetune_operator.decide.observed import JobView
from finetune_operator.logs import logger

_log = logger(__name__)
REMEMBERED = 4096
"""Number of events whose count is remembered; the API server itself forgets them after an hour."""
MOST_WAITING = 4096
"""Number of events that may wait to be written; with 1 kB each they are 4 MB."""
MESSAGE_LIMIT = 1024
"""Longest message that the API server takes."""
LONGEST_WAIT = 10.0
"""How many seconds events give way to waiting passes; after that they are written whatever waits."""
LOOK_SECONDS = 0.1
UNREACHABLE_SECONDS = 5.0
"""Pause after an event that got no answer."""
MOST_TRIES = 10
"""How often an event that gets no answer is tried, for an API server that restarts."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The job of an event. This is not the job's view, which is fifty times as large with spec and status: thousands of events
    may wait.
    """

    namespace: str
    name: str
    uid: str
    resource_version: str


@dataclass(slots=True)
class _PendingEvent:
    job: _Subject
    event: Emit
    noted: float
    times: int = 1
    tries: int = 0


class EventRecorder:
    """Writes events. An event that cannot be written is logged and never fails the pass that it is about.

    `is_busy`: whether anything more important waits. `dropped` is called for every event that is left out.
    """

    def __init__(
        self,
        api: Api,
        instance: str,
        *,
        is_busy: Callable[[], bool] = lambda: False,
        dropped: Callable[[], None] = lambda: None,
        most_waiting: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._instance = instance
        self._is_busy = is_busy
        self._dropped = dropped
        self._most_waiting = most_waiting
        self._clock = clock
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._waiting: OrderedDict[str, _PendingEvent] = OrderedDict()
        self._noted = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Events that are not written yet."""
        return len(self._waiting)

    def record(self, job: JobView, event: Emit) -> None:
        """Note the event, to be written soon."""
        digest = hashlib.sha256(f"{job.uid}\n{event.type}\n{event.reason}\n{event.message}".encode()).hexdigest()[:16]
        # An event's name may be longer than any label, so a job's name always fits.
        name = f"{job.name}.{digest}"
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.times += 1
        elif len(self._waiting) >= self._most_waiting:
            self._dropped()
        else:
            subject = _Subject(job.namespace, job.name, job.uid, job.resource_version)
            self._waiting[name] = _PendingEvent(subject, event, self._clock())
            self._noted.set()

    async def run(self) -> None:
        """Write events as they are noted, one at a time, until cancelled."""
        while True:
            await self._noted.wait()
            self._noted.clear()
            while self._waiting:
                oldest = next(iter(self._waiting.values()))
                if self._is_busy() and self._clock() - oldest.noted < LONGEST_WAIT:
                    await asyncio.sleep(LOOK_SECONDS)
                elif not await self.write_next():
                    await asyncio.sleep(UNREACHABLE_SECONDS)

    async def flush(self, seconds: float) -> None:
        """Write what waits, for so many seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._waiting and await self.write_next():
                    pass

    async def write_next(self) -> bool:
        """Write the event that waits longest, if any does. Returns False if the API server does not answer; the event then
        waits on.
        """
        if not self._waiting:
            return True
        name, waiting = self._waiting.popitem(last=False)
        job, event = waiting.job, waiting.event
        count = self._counts.pop(name, 0) + waiting.times
        self._counts[name] = count
        if len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)
        try:
            await self._write(job, event, name, count, is_first=count == waiting.times, now=utc_now())
        except ApiUnreachableError as error:
            waiting.tries += 1
            if waiting.tries < MOST_TRIES and name not in self._waiting:
                self._counts[name] = count - waiting.times
                self._waiting[name] = waiting
                self._waiting.move_to_end(name, last=False)
                return False
            self._dropped()
            _log.warning("event not written", namespace=job.namespace, job=job.name, reason=str(event.reason), error=str(error))
        except ApiError as error:
            _log.warning("event not written", namespace=job.namespace, job=job.name, reason=str(event.reason), error=str(error))
        return True

    async def _write(self, job: _Subject, event: Emit, name: str, count: int, *, is_first: bool, now: datetime) -> None:
        time = now.isoformat(timespec="seconds").replace("+00:00", "Z")
        if not is_first:
            try:
                await self._api.patch(EVENTS, job.namespace, name, {"count": count, "lastTimestamp": time})
                return
            except ApiError as error:
                if not error.is_not_found:
                    raise
        try:
            await self._api.create(EVENTS, job.namespace, self._body(job, event, name, count, time))
        except ApiError as error:
            if not error.is_already_exists:
                raise
            # Written before this process began: how often is not known, so it is counted up from what is there.
            known = await self._api.get(EVENTS, job.namespace, name)
            self._counts[name] = int((known or {}).get("count") or 1) + count
            await self._api.patch(EVENTS, job.namespace, name, {"count": self._counts[name], "lastTimestamp": time})

    def _body(self, job: _Subject, event: Emit, name: str, count: int, time: str) -> Document:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": JOB_KIND,
                "namespace": job.namespace,
                "name": job.name,
                "uid": job.uid,
                "resourceVersion": job.resource_version,
            },
            "type": event.type,
            "reason": str(event.reason),
            "message": event.message[:MESSAGE_LIMIT],
            "source": {"component": MANAGED_BY},
            "reportingComponent": f"finetune.dev/{MANAGED_BY}",
            "reportingInstance": self._instance,
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": count,
        }

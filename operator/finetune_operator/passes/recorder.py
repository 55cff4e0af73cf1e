"""Kubernetes Events about FineTuneJobs. A repeated event increases the count of the first Event, which kubectl shows.

Events are best effort: `record` only queues them, and `run` writes them one at a time, so they never delay a pass. If the same
event is already queued, its count is increased. Events are dropped if too many are queued or the server rejects them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from finetune_job.names import API_VERSION, JOB_KIND, MANAGED_BY
from finetune_operator.cache.projection import utc_now
from finetune_operator.client.answers import ApiError, ApiUnreachableError, Document
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import EVENTS
from finetune_operator.client.raw_objects import Fields
from finetune_operator.decide.actions import Emit
from finetune_operator.decide.seen.observed import JobView
from finetune_operator.decide.seen.times import timestamp
from finetune_operator.logs import logger

_log = logger(__name__)
MOST_WAITING = 4096
"""Maximum number of queued events; at 1 kB each, they take 4 MB."""
MESSAGE_LIMIT = 1024
"""Maximum length of an event's message that the API server accepts."""


@dataclass(slots=True)
class _PendingEvent:
    body: Document
    """The Event to create, without its times and its count."""
    times: int = 1


class EventRecorder:
    """Writes events. An event that cannot be written is logged, but never makes a pass fail.

    `dropped` is called for every event that is dropped.
    """

    def __init__(
        self, api: Api, instance: str, *, dropped: Callable[[], None] = lambda: None, most_waiting: int = MOST_WAITING
    ) -> None:
        self._api = api
        self._instance = instance
        self._dropped = dropped
        self._most_waiting = most_waiting
        self._waiting: OrderedDict[str, _PendingEvent] = OrderedDict()
        self._noted = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Number of events that are not written yet."""
        return len(self._waiting)

    def record(self, job: JobView, event: Emit) -> None:
        """Queue the event to be written soon."""
        digest = hashlib.sha256(f"{job.uid}\n{event.type}\n{event.reason}\n{event.message}".encode()).hexdigest()[:16]
        # An event's name may be longer than a label's value, so a job's name always fits.
        name = f"{job.name}.{digest}"
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.times += 1
        elif len(self._waiting) >= self._most_waiting:
            self._dropped()
        else:
            self._waiting[name] = _PendingEvent(self._body(job, event, name))
            self._noted.set()

    async def run(self) -> None:
        """Write queued events, one at a time, until cancelled."""
        while True:
            await self._noted.wait()
            self._noted.clear()
            while self._waiting:
                await self._write_next()

    async def flush(self, seconds: float) -> None:
        """Write the queued events, for at most this number of seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._waiting:
                    await self._write_next()

    async def _write_next(self) -> None:
        """Write the event that has been queued for longest."""
        _, waiting = self._waiting.popitem(last=False)
        try:
            await self._write(waiting.body, waiting.times)
        except (ApiError, ApiUnreachableError) as error:
            self._dropped()
            job, reason = waiting.body["involvedObject"], waiting.body["reason"]
            _log.warning("event not written", namespace=job["namespace"], job=job["name"], reason=reason, error=str(error))

    async def _write(self, body: Document, times: int) -> None:
        namespace, name, now = body["metadata"]["namespace"], body["metadata"]["name"], timestamp(utc_now())
        try:
            await self._api.create(EVENTS, namespace, body | {"count": times, "firstTimestamp": now, "lastTimestamp": now})
        except ApiError as error:
            if not error.is_already_exists:
                raise
            known = await self._api.get(EVENTS, namespace, name)
            count = Fields(known).integer("count") or 1
            await self._api.patch(EVENTS, namespace, name, {"count": count + times, "lastTimestamp": now})

    def _body(self, job: JobView, event: Emit, name: str) -> Document:
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
        }

"""Kubernetes Events on FineTuneJobs. The same event again raises the count of the first one, as kubectl shows it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from datetime import datetime

from finetune_job.names import API_VERSION, JOB_KIND, MANAGED_BY
from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.errors import ApiError, ApiUnreachableError
from finetune_operator.cluster.kinds import EVENTS
from finetune_operator.cluster.projection import utc_now
from finetune_operator.decide.actions import Emit
from finetune_operator.decide.observed import JobView
from finetune_operator.logs import logger

_log = logger(__name__)
REMEMBERED = 4096
"""Events whose count is remembered; the API server itself forgets them after an hour."""
MESSAGE_LIMIT = 1024
"""Longest message that the API server takes."""


class Recorder:
    """Writes events. An event that cannot be written is logged and never fails the pass that it tells of."""

    def __init__(self, api: Api, instance: str) -> None:
        self._api = api
        self._instance = instance
        self._counts: OrderedDict[str, int] = OrderedDict()

    async def record(self, job: JobView, event: Emit) -> None:
        """Create the event, or count it up."""
        digest = hashlib.sha256(f"{job.uid}\n{event.type}\n{event.reason}\n{event.message}".encode()).hexdigest()[:16]
        # An event's name may be longer than any label, so a job's name always fits.
        name = f"{job.name}.{digest}"
        count = self._counts.pop(name, 0) + 1
        self._counts[name] = count
        if len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)
        try:
            await self._write(job, event, name, count, utc_now())
        except (ApiError, ApiUnreachableError) as error:
            _log.warning("event not written", namespace=job.namespace, job=job.name, reason=str(event.reason), error=str(error))

    async def _write(self, job: JobView, event: Emit, name: str, count: int, now: datetime) -> None:
        time = now.isoformat(timespec="seconds").replace("+00:00", "Z")
        if count > 1:
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
            # Written before this process began: how often is not known, so it is counted up from what stands there.
            known = await self._api.get(EVENTS, job.namespace, name)
            self._counts[name] = int((known or {}).get("count") or 1) + 1
            await self._api.patch(EVENTS, job.namespace, name, {"count": self._counts[name], "lastTimestamp": time})

    def _body(self, job: JobView, event: Emit, name: str, count: int, time: str) -> Document:
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

"""Explains why Kueue holds back a Job, with the messages of the Workload that Kueue keeps for each Job.

Workloads are not watched: without Kueue there is no such resource, and with Kueue a change of the Job's own `suspend` triggers a
pass. So the Workload of a suspended Job is looked up by the UID of the Job, in each pass and every minute.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from finetune_operator.client.answers import ApiError, Document
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import Kind
from finetune_operator.client.raw_objects import Fields
from finetune_operator.decide.seen.children_seen import BatchJobView

WORKLOADS = tuple(Kind("kueue.x-k8s.io", version, "workloads", "Workload") for version in ("v1beta2", "v1beta1"))
"""Versions of the Workload kind, newest first: a release of Kueue serves one of them or both."""
LOCAL_QUEUES = tuple(replace(kind, plural="localqueues", name="LocalQueue") for kind in WORKLOADS)
CLUSTER_QUEUES = tuple(replace(kind, plural="clusterqueues", name="ClusterQueue", namespaced=False) for kind in WORKLOADS)
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
LOOK_SECONDS = 60.0
ABSENT_SECONDS = 300.0
"""How long Workloads are assumed to be missing or unreadable after a read has failed for that reason."""
LONGEST_MESSAGE = 1024
_NO_WORKLOADS = (403, 404)


class Workloads:
    """Reads the Workloads of suspended Jobs."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kind: Kind | None = None
        self._absent_until: datetime | None = None

    async def with_messages(
        self, batch_jobs: tuple[BatchJobView, ...], namespace: str, now: datetime, revisits: list[float]
    ) -> tuple[BatchJobView, ...]:
        """Return the Jobs, suspended ones with the queue's message. Adds the seconds until the next reads to `revisits`."""
        jobs = []
        for job in batch_jobs:
            if not job.suspended or job.deleting or job.has("Complete", "Failed"):
                jobs.append(job)
                continue
            workload = await self._workload(job.uid, namespace, now)
            revisits.append(LOOK_SECONDS if self._absent_until is None else ABSENT_SECONDS)
            jobs.append(replace(job, queue="" if workload is None else reason_of(workload)))
        return tuple(jobs)

    async def _workload(self, uid: str, namespace: str, now: datetime) -> Document | None:
        """Return the Workload of the Job with that UID; None if the Job has no Workload or Workloads cannot be read."""
        if self._absent_until is not None and now < self._absent_until:
            return None
        for kind in (self._kind,) if self._kind is not None else WORKLOADS:
            try:
                items = await self._api.list(kind, namespace, label_selector=f"{JOB_UID_LABEL}={uid}")
            except ApiError as error:
                if error.code not in _NO_WORKLOADS:
                    # For example, a conversion webhook of Kueue may be down. The pass over the job continues nevertheless.
                    return None
                self._kind = None
                continue
            self._kind, self._absent_until = kind, None
            return items[0] if items else None
        self._absent_until = now + timedelta(seconds=ABSENT_SECONDS)
        return None


def reason_of(workload: Document) -> str:
    """Explain why this Workload is not running: what evicted it, and what it is waiting for now."""
    fields = Fields(workload)
    status = fields.at("status")
    conditions = {item.text("type", 64): item for item in status.items("conditions")}
    messages = []
    evicted = conditions.get("Evicted")
    if evicted is not None and evicted.text("status", 16) == "True":
        messages.append(_condition_text("Evicted", evicted))
    if fields.at("spec").has("active") and not fields.at("spec").flag("active"):
        return " ".join([*messages, "The Workload is deactivated; set its spec.active to true."])
    for kind in ("QuotaReserved", "Admitted"):
        waiting = conditions.get(kind)
        if waiting is not None and waiting.text("status", 16) == "False":
            messages.append(_condition_text(kind, waiting))
            break
    checks = [check for check in status.items("admissionChecks") if check.text("state", 16) not in ("", "Ready")]
    messages += [
        f"Check {check.text('name', 253)} is {check.text('state', 16)}: {check.text('message', 512)}" for check in checks
    ]
    queue = fields.at("spec").name("queueName")
    return f"Queue {queue}: {' '.join(messages)}" if messages and queue else " ".join(messages)


def _condition_text(kind: str, condition: Fields) -> str:
    message = condition.text("message", LONGEST_MESSAGE)
    return f"{kind} ({condition.text('reason', 128)}): {message}".rstrip(": ")


async def num_waiting(api: Api, namespace: str, queue: str) -> int | None:
    """Count the Workloads of all namespaces that wait in the ClusterQueue behind a LocalQueue; None if the queues do not exist or
    cannot be read. Raises ApiUnreachableError.
    """
    try:
        local_queue = await _first(api, LOCAL_QUEUES, namespace, queue)
        cluster_queue = Fields(local_queue).at("spec").name("clusterQueue")
        document = await _first(api, CLUSTER_QUEUES, None, cluster_queue) if cluster_queue else None
    except ApiError:
        return None
    status = Fields(document).at("status")
    # The controller has not processed a queue without conditions yet, so its count is meaningless.
    return status.integer("pendingWorkloads") if status.has("conditions") else None


async def _first(api: Api, kinds: tuple[Kind, ...], namespace: str | None, name: str) -> Document | None:
    """Read the object in the newest version that the server serves; None if it does not exist."""
    for kind in kinds:
        document = await api.get(kind, namespace, name)
        if document is not None:
            return document
    return None

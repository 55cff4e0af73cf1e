"""Plays the Job controller and the kubelets: every Job gets a pod that runs and ends well, or that stays pending."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from bench.operator_pace.client import BATCH_JOBS, EVENTS, PODS, Client, Document
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.names import LABEL_ROLE

CONCURRENT = 12
UNSCHEDULABLE = "0/40 nodes are available: 40 Insufficient nvidia.com/gpu."


class Player:
    """Takes Jobs in any number and plays them once `curtain` is up. `run` plays until it is cancelled."""

    def __init__(self, client: Client, namespace: str, *, pending: bool = False) -> None:
        self._client = client
        self._namespace = namespace
        self._pending = pending
        self._jobs: asyncio.Queue[Document] = asyncio.Queue()
        self.curtain = asyncio.Event()
        self._num_played = 0
        self._progressed = asyncio.Event()

    def take(self, metadata: Document) -> None:
        """A Job was created."""
        self._jobs.put_nowait(metadata)

    async def played(self, number: int) -> None:
        """Wait until so many Jobs are played."""
        while self._num_played < number:
            self._progressed.clear()
            await self._progressed.wait()

    async def run(self) -> None:
        """Play."""
        await self.curtain.wait()
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT):
                group.create_task(self._play())

    async def _play(self) -> None:
        while True:
            job = await self._jobs.get()
            await (self._keep_pending(job) if self._pending else self._succeed(job))
            self._num_played += 1
            self._progressed.set()

    async def _keep_pending(self, job: Document) -> None:
        made = await self._client.create(PODS.format(self._namespace), _pod(job))
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNSCHEDULABLE}
        await self._client.patch_status(PODS.format(self._namespace), job["name"], {"conditions": [condition]})
        await self._client.patch_status(BATCH_JOBS.format(self._namespace), job["name"], {"active": 1, "startTime": _now()})
        await self._client.create(EVENTS.format(self._namespace), _failed_scheduling(made))

    async def _succeed(self, job: Document) -> None:
        pods, jobs, name = PODS.format(self._namespace), BATCH_JOBS.format(self._namespace), job["name"]
        begun = _now()
        await self._client.create(pods, _pod(job))
        await self._client.patch_status(pods, name, _container({"running": {"startedAt": begun}}, "Running"))
        await self._client.patch_status(jobs, name, {"active": 1, "ready": 1, "startTime": begun})
        report = TerminationReport(
            role=job["labels"][LABEL_ROLE], outcome=Outcome.SUCCEEDED, facts={"model_digest": "m" * 64, "data_hash": "d" * 64}
        )
        ended = {"exitCode": 0, "reason": "Completed", "startedAt": begun, "finishedAt": _now(), "message": report.envelope()}
        await self._client.patch_status(pods, name, _container({"terminated": ended}, "Succeeded"))
        done = [{"type": kind, "status": "True", "lastTransitionTime": _now()} for kind in ("SuccessCriteriaMet", "Complete")]
        status = {"active": 0, "ready": 0, "succeeded": 1, "completionTime": _now(), "conditions": done}
        await self._client.patch_status(jobs, name, status | {"completedIndexes": "0"} if "train" in name else status)


def _pod(job: Document) -> Document:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["name"], "uid": job["uid"], "controller": True}
    labels = {name: value for name, value in job["labels"].items() if "pod-template-hash" not in name}
    container = {"name": "main", "image": "registry.example/trainer"}
    spec = {"containers": [container], "automountServiceAccountToken": False, "restartPolicy": "Never"}
    return {"metadata": {"name": job["name"], "labels": labels, "ownerReferences": [owner]}, "spec": spec}


def _container(state: Document, phase: str) -> Document:
    entry = {
        "name": "main",
        "image": "registry.example/trainer",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": state,
    }
    return {"phase": phase, "containerStatuses": [entry]}


def _failed_scheduling(pod: Document) -> Document:
    metadata = pod["metadata"]
    involved = {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {
        "metadata": {"name": f"{metadata['name']}.1", "namespace": metadata["namespace"]},
        "involvedObject": involved,
        "type": "Warning",
        "reason": "FailedScheduling",
        "message": UNSCHEDULABLE,
        "firstTimestamp": _now(),
        "lastTimestamp": _now(),
        "count": 1,
        "source": {"component": "default-scheduler"},
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

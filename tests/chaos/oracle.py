"""What really happened, by the oracle's own watches of Jobs and pods: it shares nothing with the operator but the labels.

Events of both kinds are put in the order of their resourceVersions, which one counter of the API server gives out.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from urllib3.exceptions import HTTPError

from tests.integration.kube import Kube

Document = dict[str, Any]
JOB_UID, ROLE, ATTEMPT = "finetune.dev/job-uid", "finetune.dev/role", "finetune.dev/attempt"
KINDS = ("Job", "Pod")
JOB, MANAGED = "finetune.dev/job", "app.kubernetes.io/managed-by"


@dataclass(frozen=True, order=True)
class Moment:
    """A Job or pod as it was from a version on."""

    version: int
    kind: str
    uid: str
    job: str
    """Name and UID of the FineTuneJob."""
    role: str
    attempt: str
    gang: str
    """UID of the batch Job that it is or belongs to."""
    is_alive: bool


class Oracle:
    """Context manager: watches a namespace from before the first job on."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self._moments: list[Moment] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._versions: dict[str, str] = {}
        self._blind: list[str] = []
        self._threads = [threading.Thread(target=self._watch, args=(kind,), daemon=True) for kind in KINDS]

    def __enter__(self) -> Oracle:
        for kind in KINDS:
            # Before the first job is made, so that nothing is missed.
            self._versions[kind] = self._kube.request("GET", self._kube.path(kind, self._namespace))["metadata"][
                "resourceVersion"
            ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    def violations(self) -> list[str]:
        """Gangs that lived at the same time, and roles whose attempt was made twice."""
        with self._lock:
            moments = sorted(self._moments)
        found = list(self._blind)
        living: dict[tuple[str, str], dict[str, tuple[str, str]]] = defaultdict(dict)
        made: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        for moment in moments:
            if moment.kind == "Job":
                made[moment.job, moment.role, moment.attempt].add(moment.gang)
            alive = living[moment.job, moment.role]
            if moment.is_alive:
                alive[moment.uid] = (moment.attempt, moment.gang)
            else:
                alive.pop(moment.uid, None)
            if len({gang for _, gang in alive.values()}) > 1:
                found.append(f"{moment.job}: more than one gang of {moment.role} at {moment.version}: {sorted(alive.values())}")
        found += [f"{key}: made {len(uids)} times" for key, uids in made.items() if len(uids) > 1]
        return found

    def attempts(self, job: str, role: str) -> int:
        """How many Jobs of a role were ever made for a FineTuneJob."""
        with self._lock:
            return len(
                {
                    item.gang
                    for item in self._moments
                    if item.kind == "Job" and item.job.startswith(f"{job}/") and item.role == role
                }
            )

    def _watch(self, kind: str) -> None:
        path = self._kube.path(kind, self._namespace)
        while not self._stopping.is_set():
            url = f"{self._kube._client.configuration.host}{path}?watch=true&resourceVersion={self._versions[kind]}"
            url += "&allowWatchBookmarks=true&timeoutSeconds=300"
            with contextlib.suppress(HTTPError, OSError):
                answer = self._kube._client.rest_client.pool_manager.request("GET", url, preload_content=False, timeout=330.0)
                rest = b""
                for piece in answer.stream(65536, decode_content=True):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            self._blind.append(f"the oracle's watch of {kind} failed: {event['object']}")
                            return
                        self._versions[kind] = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            self._note(kind, event)
                    if self._stopping.is_set():
                        return

    def _note(self, kind: str, event: Document) -> None:
        item = event["object"]
        metadata, status = item["metadata"], item.get("status") or {}
        labels = metadata.get("labels") or {}
        if JOB_UID not in labels and JOB not in labels:
            return
        owner = next((reference["uid"] for reference in metadata.get("ownerReferences", ()) if reference.get("controller")), "")
        if kind == "Pod":
            is_alive = status.get("phase") not in {"Succeeded", "Failed"}
        else:
            # A Job that is being deleted or has ended makes no more pods; those that it has are looked at themselves.
            conditions = {condition["type"] for condition in status.get("conditions", ())}
            ended = conditions & {"Complete", "Failed", "FailureTarget", "SuccessCriteriaMet"}
            is_alive = not ended and "deletionTimestamp" not in metadata
        job = f"{labels.get(JOB)}/{labels.get(JOB_UID, '')}"
        gang = owner if kind == "Pod" else metadata["uid"]
        alive = is_alive and event["type"] != "DELETED"
        moment = Moment(
            int(metadata["resourceVersion"]),
            kind,
            metadata["uid"],
            job,
            labels.get(ROLE, ""),
            labels.get(ATTEMPT, ""),
            gang,
            alive,
        )
        with self._lock:
            self._moments.append(moment)


def orphans(kube: Kube, namespace: str) -> list[str]:
    """What is left of jobs that are gone, and what still runs of jobs that are finished."""
    found: list[str] = []
    jobs = {item["metadata"]["uid"]: item for item in kube.list("FineTuneJob", namespace)}
    batch_jobs = {item["metadata"]["uid"]: item for item in kube.list("Job", namespace)}
    for kind in ("Job", "ConfigMap", "Service", "NetworkPolicy", "Pod"):
        owners = batch_jobs if kind == "Pod" else jobs
        for item in kube.list(kind, namespace, f"{MANAGED}=finetune-operator"):
            owner = [reference["uid"] for reference in item["metadata"].get("ownerReferences", ()) if reference.get("controller")]
            if not owner or owner[0] not in owners:
                found.append(f"{kind} {item['metadata']['name']} has no living owner")
            elif kind == "Pod" and (item.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}:
                job = jobs.get(batch_jobs[owner[0]]["metadata"]["ownerReferences"][0]["uid"])
                conditions = (job or {}).get("status", {}).get("conditions", ())
                if any(condition["type"] == "Finished" and condition["status"] == "True" for condition in conditions):
                    found.append(f"Pod {item['metadata']['name']} runs on though its job is finished")
    return found

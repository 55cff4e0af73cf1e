"""Cache and a few live reads -> `Observed`, the input of one reconcile pass.

Live reads are made only for what no watch shows: whether claims exist, Events of pods that stay pending, whether a conflicting
object is still there, and, before a later attempt, lists without label selector: a filtered watch reports a deletion when
somebody merely removes the label, and a Job that still runs must never be mistaken for one that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from finetune_job.api.job import FineTuneJob, FineTuneJobSpec, parse_job
from finetune_job.api.profile import FineTuneProfile
from finetune_job.names import DEFAULT_PROFILE
from finetune_job.progress import Progress
from finetune_job.status.stored import read_status
from finetune_operator.children.claims import claims_named_by
from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.cluster.fields import Fields
from finetune_operator.cluster.kinds import BATCH_JOBS, CLAIMS, CONFIG_MAPS, EVENTS, JOBS, PODS, PROFILES, SERVICES, Kind
from finetune_operator.cluster.projection import Held, ObjectKey, belongs_to, labelled_job_uid
from finetune_operator.decide.earlier_attempts import needs_live_list
from finetune_operator.decide.observed import (
    ConfigMapView,
    JobView,
    LiveChildren,
    LiveJob,
    LivePod,
    Observed,
    PodView,
    ProfileView,
)
from finetune_operator.decide.stage import attempt_of, current_role, is_ended, is_terminal

CLAIM_SEEN_SECONDS = 60.0
"""How long a claim that was there is believed to be there still."""
MISSING_RETRY_SECONDS = 15.0
"""How soon to look again for a claim that is missing or a conflict that stands in the way: no watch would tell."""
PENDING_RETRY_SECONDS = 15.0
"""How often the Events of a pending pod are read."""
EVENTS_PER_POD = 5
LONGEST_EVENT = 1024
"""Characters of an event's message: what the API server takes of a new one."""


@dataclass(frozen=True)
class Gathered:
    """What a pass works on."""

    observed: Observed
    raw_status: Document
    """Status as it stands on the server, for the patch."""
    revisit_after_seconds: float | None
    """When this gathering is out of date although no watch event came."""
    cpu_seconds: float = 0.0
    """What reading the job took, without the requests."""


class Gatherer:
    """Reads for one pass. Remembers claims seen and conflicts met; both are only hints that live reads renew."""

    def __init__(self, api: Api, cache: Cache, pending_events_after: float) -> None:
        self._api = api
        self._cache = cache
        self._pending_events_after = pending_events_after
        self._claims_seen: dict[tuple[str, str], datetime] = {}
        self._conflicts: dict[str, set[tuple[Kind, str]]] = {}
        self._progress: dict[str, Progress] = {}

    def note_conflict(self, job_uid: str, kind: Kind, name: str) -> None:
        """A create met an object that is not ours."""
        self._conflicts.setdefault(job_uid, set()).add((kind, name))

    def note_progress(self, job_uid: str, progress: Progress) -> None:
        """Rank 0 had something new to tell; the next pass may write it."""
        self._progress[job_uid] = progress

    async def gather(self, key: JobKey, now: datetime) -> Gathered | None:
        """Everything about one job, or None where it does not exist (any more)."""
        held = self._cache.job(key)
        if held is None:
            return None
        begun = time.thread_time()
        document = held.document()
        job = _job_view(held, document)
        cpu_seconds = time.thread_time() - begun
        self._forget_settled_evidence(job)
        revisits: list[float] = []
        claims = await self._claims(job, now, revisits)
        uid = held.key.uid
        observed = Observed(
            job=job,
            profile=self._profile(job.spec, document),
            batch_jobs=tuple(item.batch_job for item in self._cache.owned(BATCH_JOBS, uid) if item.batch_job is not None),
            pods=await self._pods(job, now, revisits),
            plan=next((_config_map_view(item) for item in self._cache.owned(CONFIG_MAPS, uid)), None),
            service_exists=bool(self._cache.owned(SERVICES, uid)),
            claims=claims,
            conflicts=await self._standing_conflicts(job, revisits),
            progress=self._progress.pop(uid, None),
        )
        if needs_live_list(observed):
            observed = replace(observed, live=await self._live_children(job))
        return Gathered(observed, document.get("status") or {}, min(revisits, default=None), cpu_seconds)

    def _profile(self, spec: FineTuneJobSpec | None, document: Document) -> ProfileView:
        given = document.get("spec") or {}
        name = (spec.profile if spec is not None else given.get("profile")) or DEFAULT_PROFILE
        held = self._cache.profile(str(name))
        if held is None:
            return ProfileView(name=str(name))
        try:
            profile = FineTuneProfile.model_validate(_envelope(held.document(), PROFILES))
        except ValidationError as error:
            return ProfileView(name=str(name), error=_lines(error))
        return ProfileView(name=str(name), spec=profile.spec)

    async def _claims(self, job: JobView, now: datetime, revisits: list[float]) -> frozenset[str]:
        if job.spec is None or is_ended(job.status):
            return frozenset()
        present = set()
        for claim in claims_named_by(job.spec, job.name):
            place = (job.namespace, claim)
            seen = self._claims_seen.get(place)
            if seen is None or (now - seen).total_seconds() > CLAIM_SEEN_SECONDS:
                if await self._api.get(CLAIMS, job.namespace, claim) is None:
                    self._claims_seen.pop(place, None)
                    revisits.append(MISSING_RETRY_SECONDS)
                    continue
                self._claims_seen[place] = now
            present.add(claim)
        return frozenset(present)

    async def _pods(self, job: JobView, now: datetime, revisits: list[float]) -> tuple[PodView, ...]:
        pods = []
        for held in self._cache.pods_of(job.uid):
            pod = held.pod
            if pod is None:
                continue
            if pod.phase == "Pending" and not pod.gone and not is_ended(job.status):
                young = self._pending_events_after - (now - pod.created).total_seconds()
                if young > 0:
                    revisits.append(young + 0.1)
                else:
                    revisits.append(PENDING_RETRY_SECONDS)
                    pod = replace(pod, events=await self._warnings(job.namespace, pod.uid))
            pods.append(pod)
        return tuple(pods)

    async def _warnings(self, namespace: str, uid: str) -> tuple[str, ...]:
        events, _ = await self._api.list(EVENTS, namespace, field_selector=f"involvedObject.uid={uid},type=Warning")
        told = [Fields(event) for event in events]
        told.sort(key=lambda event: event.text("lastTimestamp", 32) or event.text("eventTime", 32))
        return tuple(f"{event.text('reason', 128)}: {event.text('message', LONGEST_EVENT)}" for event in told[-EVENTS_PER_POD:])

    async def _standing_conflicts(self, job: JobView, revisits: list[float]) -> tuple[str, ...]:
        standing = set()
        for kind, name in self._conflicts.pop(job.uid, set()):
            document = await self._api.get(kind, job.namespace, name)
            if document is not None and not belongs_to(document, job.uid):
                standing.add((kind, name))
        if standing:
            self._conflicts[job.uid] = standing
            revisits.append(MISSING_RETRY_SECONDS)
        return tuple(sorted(f"{kind.name}/{name}" for kind, name in standing))

    async def _live_children(self, job: JobView) -> LiveChildren:
        batch_jobs, _ = await self._api.list(BATCH_JOBS, job.namespace)
        ours = [_live_job(key, item) for key, item in self._readable(BATCH_JOBS, batch_jobs) if key.owner_uid == job.uid]
        known = {one.uid for one in ours} | self._cache.batch_job_uids_of(job.uid)
        pods, _ = await self._api.list(PODS, job.namespace)
        running = [
            _live_pod(key, item)
            for key, item in self._readable(PODS, pods)
            if (key.owner_uid in known or labelled_job_uid(item) == job.uid)
            and Fields(item).at("status").text("phase", 32) not in ("Succeeded", "Failed")
        ]
        return LiveChildren(
            batch_jobs=tuple(sorted(ours, key=lambda one: one.name)), running_pods=tuple(sorted(running, key=lambda one: one.name))
        )

    def _readable(self, kind: Kind, documents: list[Document]) -> Iterator[tuple[ObjectKey, Document]]:
        for document in documents:
            key = self._cache.key_of(kind, document)
            if key is not None:
                yield key, document

    def _forget_settled_evidence(self, job: JobView) -> None:
        """Gone pods are needed until the outcome of their attempt stands in the status."""
        existing = {held.key.uid for held in self._cache.owned(BATCH_JOBS, job.uid)}
        role = current_role(job.status)
        current = (role, attempt_of(job.status, role))
        finished = is_terminal(job.status)

        def is_settled(held: Held) -> bool:
            pod = held.pod
            if pod is None or held.key.owner_uid in existing:
                return False
            return finished or (pod.role, pod.attempt) != current

        self._cache.forget_evidence(job.uid, is_settled)


def _envelope(document: Document, kind: Kind) -> Document:
    return document | {"apiVersion": kind.api_version, "kind": kind.name}


def _job_view(held: Held, document: Document) -> JobView:
    spec, error = None, ""
    try:
        # Status is read apart: an older operator must not refuse a manifest for what a newer one reported.
        parsed: FineTuneJob = parse_job({name: value for name, value in _envelope(document, JOBS).items() if name != "status"})
        spec = parsed.spec
    except ValidationError as refusal:
        error = _lines(refusal)
    metadata: dict[str, Any] = document["metadata"]
    return JobView(
        namespace=held.key.namespace,
        name=held.key.name,
        uid=held.key.uid,
        generation=metadata.get("generation") or 0,
        resource_version=str(held.key.version),
        spec=spec,
        spec_error=error,
        status=read_status(document.get("status")),
        deleting="deletionTimestamp" in metadata,
    )


def _live_job(key: ObjectKey, document: Document) -> LiveJob:
    return LiveJob(name=key.name, uid=key.uid, deleting=Fields(document).at("metadata").has("deletionTimestamp"))


def _live_pod(key: ObjectKey, document: Document) -> LivePod:
    fields = Fields(document)
    return LivePod(
        name=key.name,
        uid=key.uid,
        node=fields.at("spec").name("nodeName"),
        deletion_due=fields.at("metadata").time("deletionTimestamp"),
    )


def _config_map_view(held: Held) -> ConfigMapView:
    return ConfigMapView(name=held.key.name, uid=held.key.uid, plan_json=held.document()["plan"])


def _lines(error: ValidationError) -> str:
    """One line per wrong field."""
    return "\n".join(f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors())

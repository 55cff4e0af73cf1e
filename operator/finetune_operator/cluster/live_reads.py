"""Reads what no watch shows, before a pass: children whose existence is not certain, and everything that runs.

A filtered watch reports a deletion when somebody merely removes the label, and reports nothing about that object from then on;
but a Job that still runs must never be mistaken for one that is gone.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from finetune_job.names import LABEL_JOB_UID, network_policy_name
from finetune_operator.cluster.api import Api
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.kinds import BATCH_JOBS, JOBS, NETWORK_POLICIES, PODS, Kind
from finetune_operator.cluster.notes import JobNotes, LiveList
from finetune_operator.cluster.object_key import ObjectKey, labelled_job_uid
from finetune_operator.cluster.raw_objects import Fields
from finetune_operator.decide.children_seen import BatchJobView, LiveChildren, LiveJob, LivePod, PolicyView
from finetune_operator.decide.observed import JobView
from finetune_operator.decide.stage import current_role

UNWATCHED_SECONDS = 15.0
"""Pause between reads of an object that no watch shows because its label was removed."""
LISTED_SECONDS = 60.0
"""How long a live list is valid if no event changes what it showed."""
STILL_RUNS = "status.phase!=Succeeded,status.phase!=Failed"


class LiveReads:
    """Takes what it reads into the cache."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def look_up(self, job: JobView, notes: JobNotes, now: datetime) -> float | None:
        """Read every child that the watches do not show. Returns after how many seconds to do it again."""
        unwatched = False
        before = notes.looked_up or {}
        looked_up: dict[str, datetime] = {}
        for kind, cached in self._cache.to_look_up(job.uid):
            key = cached.key
            last = before.get(key.uid)
            is_due = last is None or (now - last).total_seconds() >= UNWATCHED_SECONDS
            if is_due or self._cache.is_in_doubt(cached):
                last = now
                unwatched |= await self._read(kind, key) and not self._cache.is_watched(kind, key.uid)
            else:
                unwatched = True
            looked_up[key.uid] = last or now
        notes.looked_up = looked_up
        return UNWATCHED_SECONDS if unwatched else None

    async def _read(self, kind: Kind, key: ObjectKey) -> bool:
        """Read an object again. Returns whether it exists and is ours."""
        document = await self._api.get(kind, key.namespace, key.name)
        current = None if document is None else self._cache.key_of(kind, document)
        if current is None or current.uid != key.uid:
            self._cache.found_gone(kind, key.uid)
            return False
        return self._cache.found(kind, document)

    async def read_again(self, job: JobView, batch_job: BatchJobView) -> None:
        """Read a Job and its pods again, in case the watches are late."""
        for cached in self._cache.owned(BATCH_JOBS, job.uid):
            if cached.key.uid == batch_job.uid:
                await self._read(BATCH_JOBS, cached.key)
        pods, _ = await self._api.list(PODS, job.namespace, label_selector=f"{LABEL_JOB_UID}={job.uid}")
        for pod in pods:
            self._cache.take(PODS, pod)
        shown = {Fields(pod).at("metadata").name("uid") for pod in pods}
        for cached in self._cache.owned(PODS, batch_job.uid):
            if cached.key.uid not in shown and not cached.is_gone:
                await self._read(PODS, cached.key)

    async def network_policies(self, job: JobView) -> tuple[PolicyView, ...]:
        """NetworkPolicies of the job that are not being deleted."""
        policies = []
        for name in (network_policy_name(job.name), network_policy_name(job.name, ways_out=True)):
            document = await self._api.get(NETWORK_POLICIES, job.namespace, name)
            key = None if document is None else self._cache.key_of(NETWORK_POLICIES, document)
            if key is not None and _is_controlled_by(key, job.uid) and not key.is_deleting:
                policies.append(PolicyView(name, key.uid))
        return tuple(policies)

    async def finds(self, kind: Kind, namespace: str, name: str) -> bool:
        """Whether a child of that name exists and is ours although no list has shown it, because it lacks our label."""
        document = await self._api.get(kind, namespace, name)
        return document is not None and self._cache.found(kind, document)

    async def children(self, job: JobView, notes: JobNotes, now: datetime) -> LiveChildren:
        """List Jobs and pods without label selector, filtered by owner UID. Only metadata is transferred."""
        listed = notes.listed
        if listed is not None and self._holds(listed, job, now):
            return listed.children
        batch_jobs = [key for key, _ in await self._list(BATCH_JOBS, job.namespace) if _is_controlled_by(key, job.uid)]
        for key in batch_jobs:
            if not self._cache.is_known(BATCH_JOBS, key):
                await self._read(BATCH_JOBS, key)
        known = {key.uid for key in batch_jobs} | self._cache.batch_job_uids_of(job.uid)
        pods = [
            await self._live_pod(key, item)
            for key, item in await self._list(PODS, job.namespace, field_selector=STILL_RUNS)
            if (key.owner_uid in known or (labelled_job_uid(item) == job.uid and _may_be_ours(key))) and not _has_ended(item)
        ]
        children = LiveChildren(
            batch_jobs=tuple(sorted((LiveJob(key.name, key.uid, key.is_deleting) for key in batch_jobs), key=_name)),
            running_pods=tuple(sorted((pod for pod in pods if pod is not None), key=_name)),
        )
        shown = [(BATCH_JOBS, child.uid) for child in children.batch_jobs] + [
            (PODS, child.uid) for child in children.running_pods
        ]
        is_watched = all(self._cache.is_watched(kind, uid) for kind, uid in shown)
        # A list in which nothing has to be waited for is not kept, but made again before each creation: a Job that was created
        # after it may be gone again, without its pods and without a trace in the cache.
        role = current_role(job.status)
        others = {
            cached.key.uid
            for cached in self._cache.owned(BATCH_JOBS, job.uid)
            if cached.batch_job and cached.batch_job.role != role
        }
        is_kept = bool(children.running_pods) or any(child.uid not in others for child in children.batch_jobs)
        notes.listed = LiveList(children, self._cache.fingerprint(job.uid), now, is_watched) if is_kept else None
        return children

    def _holds(self, listed: LiveList, job: JobView, now: datetime) -> bool:
        age = (now - listed.at).total_seconds()
        is_young = age < (LISTED_SECONDS if listed.is_watched else UNWATCHED_SECONDS)
        return is_young and listed.fingerprint == self._cache.fingerprint(job.uid)

    async def _list(self, kind: Kind, namespace: str, **selector: str) -> list[tuple[ObjectKey, Any]]:
        items, _ = await self._api.list(kind, namespace, metadata_only=True, **selector)
        keyed = [(self._cache.key_of(kind, item), item) for item in items]
        return [(key, item) for key, item in keyed if key is not None]

    async def _live_pod(self, key: ObjectKey, metadata: Any) -> LivePod | None:
        due = Fields(metadata).at("metadata").time("deletionTimestamp")
        known = self._cache.pod(key)
        if known is not None and known.node:
            return LivePod(key.name, key.uid, known.node, due, orphaned=not key.owner_uid)
        document = await self._api.get(PODS, key.namespace, key.name)
        if document is None:
            return None
        self._cache.take(PODS, document)
        return LivePod(key.name, key.uid, Fields(document).at("spec").name("nodeName"), due, orphaned=not key.owner_uid)


def _is_controlled_by(key: ObjectKey, job_uid: str) -> bool:
    return key.owner_uid == job_uid and key.is_controlled_by(JOBS)


def _may_be_ours(key: ObjectKey) -> bool:
    """Whether a pod with our label and an unknown controller can belong to a Job that is gone. A pod of a ReplicaSet cannot."""
    return not key.owner_uid or key.is_controlled_by(BATCH_JOBS)


def _has_ended(pod: Any) -> bool:
    """Whether a pod has ended. Some servers return more than the field selector asks for."""
    return Fields(pod).at("status").text("phase", 32) in ("Succeeded", "Failed")


def _name(child: LiveJob | LivePod) -> str:
    return child.name

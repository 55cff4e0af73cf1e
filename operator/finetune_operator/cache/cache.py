"""The cache of cluster objects: one projection per object, keyed by UID, with an index from owners to owned objects.

It is filled by the first complete list, by watch events, and by the responses to our own writes and reads. Thanks to the
responses, a pass does not create a child again just because no watch has reported it yet. An object never reverts to an older
resourceVersion. A deleted pod is kept, marked `gone`, as evidence of how it ended: as soon as one rank fails, the Job controller
deletes all other pods, whose reports must still reach the status.

Children are watched by a label that anybody may add or remove:
* The label does not prove that an object is ours. An object's content is used only if its controller is a known FineTuneJob in
  the same namespace, or a Job of such a FineTuneJob.
* A child that loses the label counts as deleted, because to watches and lists the two look the same. Before another Job is
  created, live lists without the label selector show what is still running.

It is used from a single event loop. The metrics thread also reads single entries and whole dictionaries, which is safe under the
GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from finetune_operator.cache.projection import CachedObject, project
from finetune_operator.cache.waiting_line import WaitingLines
from finetune_operator.client.kinds import BATCH_JOBS, CACHED, CHILDREN, JOBS, PODS, PROFILES, JobKey, Kind
from finetune_operator.client.object_key import ObjectKey, UnreadableObjectError, object_key
from finetune_operator.client.raw_objects import Fields, UnreadableObjects
from finetune_operator.decide.seen.children_seen import PodView

TOMBSTONE_SECONDS = 900.0
"""How long the UID of a deleted object is remembered, so that a list that began before the deletion cannot bring it back."""


class Cache:
    """Holds the projections of all watched objects, and decides which updates are accepted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, unreadable: UnreadableObjects | None = None) -> None:
        self._objects: dict[Kind, dict[str, CachedObject]] = {kind: {} for kind in CACHED}
        self._owned: dict[Kind, dict[str, set[str]]] = {kind: {} for kind in CACHED}
        """UID of an owner -> UIDs of the objects that it owns. An entry does not prove ownership, which `_job_of` checks."""
        self._job_uids: dict[JobKey, str] = {}
        self._profiles: dict[str, str] = {}
        self._job_of_batch_job: dict[str, str] = {}
        """UID of a batch Job -> UID of its FineTuneJob, kept while pods of the batch Job are known."""
        self._batch_jobs_of: dict[str, set[str]] = {}
        """UID of a FineTuneJob -> UIDs of its batch Jobs, kept for the same time."""
        self.lines = WaitingLines(self._objects[JOBS], self._most_active_jobs)
        self._clock = clock
        self._unreadable = unreadable or UnreadableObjects()
        self._tombstones: dict[str, tuple[int, float]] = {}
        """UID of a deleted object -> the lowest version that would prove that it still exists, and when the entry was made."""
        self.job_gone: Callable[[str], None] = lambda _: None
        """Called with the UID of a FineTuneJob that is gone, so that others can drop their notes about it."""

    def read(self, kind: Kind, document: Any) -> CachedObject | None:
        """Project an object with arbitrary content; None if it is not ours, or if its identity cannot be read."""
        key = self.key_of(kind, document)
        if key is None or (kind in CHILDREN and not self._job_of(kind, key)):
            return None
        known = self._objects[kind].get(key.uid)
        if known is not None and known.key.version >= key.version and not known.is_gone:
            return known
        cached = project(kind, document)
        if cached.unreadable:
            self._unreadable.note(kind, document, cached.unreadable)
        return cached

    def key_of(self, kind: Kind, document: Any) -> ObjectKey | None:
        """Read the identity and owner of an object; None if they cannot be read."""
        try:
            return object_key(document)
        except UnreadableObjectError as error:
            self._unreadable.note(kind, document, (str(error),))
            return None

    def take(self, kind: Kind, document: Any) -> set[JobKey]:
        """Store an object that the API server has just returned. Returns the jobs to reconcile."""
        cached = self.read(kind, document)
        return self._disown(kind, document) if cached is None else self.apply(kind, cached)

    def take_deleted(self, kind: Kind, document: Any) -> set[JobKey]:
        """Process an object that a watch reports as deleted, with its last state. Returns the jobs to reconcile."""
        if self._is_outdated(kind, document):
            # A later state is known, so the object still exists, although it may no longer be watched.
            return set()
        cached = self.read(kind, document)
        return self._disown(kind, document) if cached is None else self.remove(kind, cached)

    def _is_outdated(self, kind: Kind, document: Any) -> bool:
        """Whether a later state of the object is known."""
        key = self.key_of(kind, document)
        known = None if key is None else self._objects[kind].get(key.uid)
        return key is not None and known is not None and known.key.version > key.version

    def _disown(self, kind: Kind, document: Any) -> set[JobKey]:
        """Drop an object that has lost its owner reference, or whose owner is gone."""
        key = self.key_of(kind, document)
        known = None if key is None else self._objects[kind].get(key.uid)
        if known is None or self._is_outdated(kind, document):
            return set()
        self._drop(kind, known.key.uid)
        return self._concerned(kind, known.key)

    def apply(self, kind: Kind, cached: CachedObject) -> set[JobKey]:
        """Store the state of an object if it is newer. Returns the jobs to reconcile; none if nothing is new."""
        uid, version = cached.key.uid, cached.key.version
        known = self._objects[kind].get(uid)
        buried = self._tombstones.get(uid)
        if buried is not None and version < buried[0]:
            return set()
        if known is not None and buried is None and known.key.version >= version:
            return set()
        self._tombstones.pop(uid, None)
        self._put(kind, cached)
        is_news = known is None or replace(known, key=replace(known.key, version=version)) != cached
        return self._concerned(kind, cached.key) if is_news else set()

    def remove(self, kind: Kind, cached: CachedObject) -> set[JobKey]:
        """Process the deletion of an object that a watch reports with its last state. Returns the jobs to reconcile."""
        uid, version = cached.key.uid, cached.key.version
        known = self._objects[kind].get(uid)
        if known is None:
            if kind != PODS or uid in self._tombstones:
                self._tombstones.setdefault(uid, (version, self._clock()))
                return set()
            # We never saw this pod being created, but its last state is still evidence.
            self._put(kind, cached)
        return self.bury(kind, cached)

    def found(self, kind: Kind, document: Any) -> bool:
        """Store an object from a live read, which overrides watches and lists. Returns whether it is ours."""
        cached = self.read(kind, document)
        if cached is None:
            self._drop(kind, Fields(document).at("metadata").name("uid"))
            return False
        self._tombstones.pop(cached.key.uid, None)
        self.apply(kind, cached)
        return True

    def found_gone(self, kind: Kind, uid: str) -> None:
        """Record that a live read no longer found the object."""
        known = self._objects[kind].get(uid)
        if known is not None:
            # A list requested before the deletion must not bring this state back.
            self.bury(kind, known, known.key.version + 1)

    def bury(self, kind: Kind, cached: CachedObject, list_version: int = 0) -> set[JobKey]:
        """Record that an object is gone. Returns the jobs to reconcile. `list_version`: version of a list that lacks it."""
        uid = cached.key.uid
        if uid not in self._objects[kind]:
            return set()
        self._tombstones[uid] = (max(cached.key.version, list_version), self._clock())
        concerned = self._concerned(kind, cached.key)
        if kind == PODS and cached.pod is not None and self._job_of(kind, cached.key):
            self._put(kind, replace(cached, pod=replace(cached.pod, gone=True)))
        else:
            self._drop(kind, uid)
        if kind == JOBS:
            self._forget_job(uid)
        return concerned

    def remove_missing(self, kind: Kind, present: set[str], list_version: int, namespaces: tuple[str, ...] = ()) -> set[JobKey]:
        """Remove objects that are missing from a complete list at `list_version`. Returns the affected jobs."""
        concerned: set[JobKey] = set()
        for uid, cached in list(self._objects[kind].items()):
            watched = not namespaces or not kind.namespaced or cached.key.namespace in namespaces
            if uid not in present and not cached.is_gone and watched and cached.key.version <= list_version:
                concerned |= self.bury(kind, cached, list_version + 1)
        oldest = self._clock() - TOMBSTONE_SECONDS
        for uid in [uid for uid, (_, buried) in self._tombstones.items() if buried < oldest]:
            if uid not in self._objects[PODS]:
                del self._tombstones[uid]
        return concerned

    def forget_evidence(self, job_uid: str, is_settled: Callable[[CachedObject], bool]) -> None:
        """Drop a job's deleted pods for which `is_settled` is true: no later pass needs their outcome."""
        settled = [
            cached for cached in self.pods_of(job_uid) if cached.pod is not None and cached.pod.gone and is_settled(cached)
        ]
        for cached in settled:
            self._drop(PODS, cached.key.uid)

    def fingerprint(self, job_uid: str) -> frozenset[tuple[str, int]]:
        """Return a value that changes whenever a batch Job or pod of the FineTuneJob changes."""
        children = self.owned(BATCH_JOBS, job_uid) + self.pods_of(job_uid)
        return frozenset((child.key.uid, child.key.version) for child in children)

    def _forget_job(self, job_uid: str) -> None:
        """Drop all entries that belong to a deleted job."""
        self.forget_evidence(job_uid, lambda _: True)
        self.job_gone(job_uid)

    def _concerned(self, kind: Kind, key: ObjectKey) -> set[JobKey]:
        if kind == PROFILES:
            return {
                JobKey(job.key.namespace, job.key.name)
                for job in self._objects[JOBS].values()
                if job.summary is not None and job.summary.profile == key.name and not job.summary.is_finished
            }
        if kind == JOBS:
            return {JobKey(key.namespace, key.name)}
        job = self._objects[JOBS].get(self._job_of(kind, key))
        return set() if job is None else {JobKey(job.key.namespace, job.key.name)}

    def job(self, key: JobKey) -> CachedObject | None:
        """The FineTuneJob with this key, if it is in the cache."""
        uid = self._job_uids.get(key)
        return None if uid is None else self._objects[JOBS].get(uid)

    def jobs(self) -> list[CachedObject]:
        """Every FineTuneJob."""
        return list(self._objects[JOBS].values())

    def job_of_uid(self, uid: str) -> CachedObject | None:
        """The FineTuneJob with this UID, if it is in the cache."""
        return self._objects[JOBS].get(uid)

    def job_keys(self) -> list[JobKey]:
        """Keys of all FineTuneJobs."""
        return list(self._job_uids)

    def profiles(self) -> list[CachedObject]:
        """Every FineTuneProfile."""
        return list(self._objects[PROFILES].values())

    def profile(self, name: str) -> CachedObject | None:
        """The FineTuneProfile with this name, if it is in the cache."""
        uid = self._profiles.get(name)
        return None if uid is None else self._objects[PROFILES].get(uid)

    def _most_active_jobs(self, profile: str) -> int | None:
        cached = self.profile(profile)
        return cached.profile.max_active_jobs if cached is not None and cached.profile is not None else None

    def owned(self, kind: Kind, owner_uid: str) -> list[CachedObject]:
        """Objects that are verifiably controlled by the owner with that UID."""
        objects = self._objects[kind]
        return [objects[uid] for uid in sorted(self._owned[kind].get(owner_uid, ()))]

    def pods_of(self, job_uid: str) -> list[CachedObject]:
        """Pods of every batch Job of a FineTuneJob, including those that are gone."""
        return [cached for batch_job in sorted(self._batch_jobs_of.get(job_uid, ())) for cached in self.owned(PODS, batch_job)]

    def batch_job_uids_of(self, job_uid: str) -> set[str]:
        """UIDs of a FineTuneJob's batch Jobs that are in the cache or have a pod in the cache."""
        return set(self._batch_jobs_of.get(job_uid, ()))

    def is_known(self, kind: Kind, key: ObjectKey) -> bool:
        """Whether the cache has this version of the object or a later one."""
        cached = self._objects[kind].get(key.uid)
        return cached is not None and cached.key.version >= key.version

    def is_watched(self, kind: Kind, uid: str) -> bool:
        """Whether the object is in the cache and has the label by which the watches select."""
        cached = self._objects[kind].get(uid)
        return cached is not None and cached.key.is_labelled

    def pod(self, key: ObjectKey) -> PodView | None:
        """The view of a pod; None if the pod is not in the cache."""
        cached = self._objects[PODS].get(key.uid)
        return None if cached is None else cached.pod

    def num_objects(self) -> dict[str, int]:
        """Name of each kind -> number of its objects in the cache."""
        return {kind.name: len(objects) for kind, objects in self._objects.items()}

    def job_key_of(self, kind: Kind, uid: str) -> JobKey | None:
        """Key of the FineTuneJob to which a cached Job or pod belongs; None if it is not known."""
        cached = self._objects[kind].get(uid)
        job = None if cached is None else self._objects[JOBS].get(self._job_of(kind, cached.key))
        return None if job is None else JobKey(job.key.namespace, job.key.name)

    def _job_of(self, kind: Kind, key: ObjectKey) -> str:
        """UID of the FineTuneJob to which a child belongs according to its controller reference; empty if that is not proved.

        Owner references do not cross namespaces: an object is never the child of an owner in another namespace.
        """
        if kind == PODS:
            job_uid = self._job_of_batch_job.get(key.owner_uid, "") if key.is_controlled_by(BATCH_JOBS) else ""
        else:
            job_uid = key.owner_uid if key.is_controlled_by(JOBS) else ""
        job = self._objects[JOBS].get(job_uid)
        return job_uid if job is not None and job.key.namespace == key.namespace else ""

    def _put(self, kind: Kind, cached: CachedObject) -> None:
        uid = cached.key.uid
        known = self._objects[kind].get(uid)
        if known is not None and known.key.owner_uid != cached.key.owner_uid:
            self._drop(kind, uid)
        self._objects[kind][uid] = cached
        if cached.key.owner_uid:
            self._owned[kind].setdefault(cached.key.owner_uid, set()).add(uid)
        if kind == JOBS:
            name = JobKey(cached.key.namespace, cached.key.name)
            if self._may_have_name(cached, JOBS, self._job_uids.get(name)):
                self._job_uids[name] = uid
            if known is not None:
                self.lines.moved(known, cached)
        elif kind == PROFILES and self._may_have_name(cached, PROFILES, self._profiles.get(cached.key.name)):
            self._profiles[cached.key.name] = uid
        elif kind == BATCH_JOBS:
            self._job_of_batch_job[uid] = cached.key.owner_uid
            self._batch_jobs_of.setdefault(cached.key.owner_uid, set()).add(uid)

    def _may_have_name(self, cached: CachedObject, kind: Kind, named: str | None) -> bool:
        """Whether no newer object has taken the name. Events of a deleted object may arrive after its successor of the same name
        is known: only the events of a single object are ordered, and responses to our own requests arrive before events.
        """
        known = None if named is None else self._objects[kind].get(named)
        return known is None or known.key.version <= cached.key.version

    def _drop(self, kind: Kind, uid: str) -> None:
        cached = self._objects[kind].pop(uid, None)
        if cached is None:
            return
        owner_uid = cached.key.owner_uid
        _discard(self._owned[kind], owner_uid, uid)
        if kind == PODS and owner_uid not in self._objects[BATCH_JOBS] and owner_uid not in self._owned[PODS]:
            self._forget_batch_job(owner_uid)
        elif kind == BATCH_JOBS and uid not in self._owned[PODS]:
            self._forget_batch_job(uid)
        elif kind == JOBS:
            if self._job_uids.get(JobKey(cached.key.namespace, cached.key.name)) == uid:
                del self._job_uids[JobKey(cached.key.namespace, cached.key.name)]
            self.lines.moved(cached, None)
        elif kind == PROFILES and self._profiles.get(cached.key.name) == uid:
            del self._profiles[cached.key.name]

    def _forget_batch_job(self, uid: str) -> None:
        job_uid = self._job_of_batch_job.pop(uid, None)
        if job_uid is not None:
            _discard(self._batch_jobs_of, job_uid, uid)


def _discard(index: dict[str, set[str]], owner: str, uid: str) -> None:
    owned = index.get(owner, set())
    owned.discard(uid)
    if not owned:
        index.pop(owner, None)

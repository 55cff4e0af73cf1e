"""What we know of the cluster: one projection per object, by UID, with an index from owner to owned.

Fed by the first complete list, by every watch event, and by the answers to our own writes; the last is what keeps a pass from
creating a child twice because its creation has not come back through a watch yet. An object never goes back to an older
resourceVersion. A pod that was deleted is kept, marked `gone`, as evidence of how it ended: the Job controller deletes the
others as soon as one rank fails, and what they said must reach the status first.

Used from one event loop; the metrics thread only reads whole dictionaries, which the interpreter's lock makes safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from finetune_operator.cluster.kinds import BATCH_JOBS, CONFIG_MAPS, JOBS, PODS, PROFILES, SERVICES, WATCHED, Kind
from finetune_operator.cluster.projection import Held, ObjectKey, UnreadableObjectError, object_key, project
from finetune_operator.cluster.unreadable import UnreadableObjects

TOMBSTONE_SECONDS = 900.0
"""How long the UID of a deleted object is remembered, so that a list begun before its deletion cannot bring it back."""


class JobKey(NamedTuple):
    """Key of the work queue: a FineTuneJob."""

    namespace: str
    name: str


class Cache:
    """Projections of all watched objects."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, unreadable: UnreadableObjects | None = None) -> None:
        self._clock = clock
        self._unreadable = unreadable or UnreadableObjects()
        self._objects: dict[Kind, dict[str, Held]] = {kind: {} for kind in WATCHED}
        self._owned: dict[Kind, dict[str, set[str]]] = {kind: {} for kind in WATCHED}
        """Owner UID -> UIDs of that kind."""
        self._job_uids: dict[JobKey, str] = {}
        self._profiles: dict[str, str] = {}
        self._job_of_batch_job: dict[str, str] = {}
        """UID of a batch Job -> UID of its FineTuneJob, kept while pods of it are known."""
        self._batch_jobs_of: dict[str, set[str]] = {}
        """The same the other way round."""
        self._tombstones: dict[str, float] = {}

    def read(self, kind: Kind, document: Any) -> Held | None:
        """What is kept of an object, whatever stands in it; None where not even its identity can be read.

        The watch thread calls it, too.
        """
        try:
            held = project(kind, document)
        except UnreadableObjectError as error:
            self._unreadable.note(kind, document, (str(error),))
            return None
        if held.unreadable:
            self._unreadable.note(kind, document, held.unreadable)
        return held

    def key_of(self, kind: Kind, document: Any) -> ObjectKey | None:
        """Identity and owner of an object, or None where they cannot be read."""
        try:
            return object_key(document)
        except UnreadableObjectError as error:
            self._unreadable.note(kind, document, (str(error),))
            return None

    def take(self, kind: Kind, document: Any) -> set[JobKey]:
        """Take in an object as the API server has just given it."""
        held = self.read(kind, document)
        return set() if held is None else self.apply(kind, held)

    def apply(self, kind: Kind, held: Held) -> set[JobKey]:
        """Take in a newer state of an object. Returns the jobs to reconcile; none where nothing is new."""
        uid = held.key.uid
        known = self._objects[kind].get(uid)
        if uid in self._tombstones or (known is not None and known.key.version >= held.key.version):
            return set()
        self._put(kind, held)
        if known is not None and replace(known, key=held.key) == held:
            return set()
        return self._concerned(kind, held)

    def remove(self, kind: Kind, held: Held) -> set[JobKey]:
        """Take in a deletion; `held` is the last state. Returns the jobs to reconcile."""
        uid = held.key.uid
        if uid in self._tombstones:
            return set()
        self._tombstones[uid] = self._clock()
        if kind == PODS and held.pod is not None and self._job_uid_of_pod(held) in self._objects[JOBS]:
            self._put(kind, replace(held, pod=replace(held.pod, gone=True)))
        else:
            self._drop(kind, uid)
        if kind == JOBS:
            self._forget_job(uid)
        return self._concerned(kind, held)

    def drop_ghosts(self, kind: Kind, listed: Iterable[str], list_version: str, namespaces: tuple[str, ...] = ()) -> set[JobKey]:
        """Remove what a complete list at that version does not hold: its deletion was missed."""
        present = set(listed)
        concerned: set[JobKey] = set()
        for uid, held in list(self._objects[kind].items()):
            gone = held.pod is not None and held.pod.gone
            watched = not namespaces or not kind.namespaced or held.key.namespace in namespaces
            if uid not in present and not gone and watched and held.key.version <= int(list_version):
                concerned |= self.remove(kind, held)
        oldest = self._clock() - TOMBSTONE_SECONDS
        for uid in [uid for uid, buried in self._tombstones.items() if buried < oldest]:
            held_pod = self._objects[PODS].get(uid)
            if held_pod is None:
                del self._tombstones[uid]
        return concerned

    def forget_evidence(self, job_uid: str, is_settled: Callable[[Held], bool]) -> None:
        """Drop deleted pods of a job whose outcome no later pass can need, as `is_settled` says."""
        for held in self.pods_of(job_uid):
            if held.pod is not None and held.pod.gone and is_settled(held):
                self._drop(PODS, held.key.uid)

    def job(self, key: JobKey) -> Held | None:
        """The FineTuneJob of that name."""
        uid = self._job_uids.get(key)
        return None if uid is None else self._objects[JOBS].get(uid)

    def jobs(self) -> list[Held]:
        """Every FineTuneJob."""
        return list(self._objects[JOBS].values())

    def job_keys(self) -> list[JobKey]:
        """Keys of every FineTuneJob."""
        return list(self._job_uids)

    def profile(self, name: str) -> Held | None:
        """The FineTuneProfile of that name."""
        uid = self._profiles.get(name)
        return None if uid is None else self._objects[PROFILES].get(uid)

    def owned(self, kind: Kind, owner_uid: str) -> list[Held]:
        """Objects whose controller owner has that UID."""
        objects = self._objects[kind]
        return [objects[uid] for uid in sorted(self._owned[kind].get(owner_uid, ()))]

    def pods_of(self, job_uid: str) -> list[Held]:
        """Pods of every batch Job of a FineTuneJob, gone ones included."""
        return [held for batch_job in sorted(self._batch_jobs_of.get(job_uid, ())) for held in self.owned(PODS, batch_job)]

    def batch_job_uids_of(self, job_uid: str) -> set[str]:
        """UIDs of every batch Job of a FineTuneJob of which the Job or a pod is known."""
        return set(self._batch_jobs_of.get(job_uid, ()))

    def has_batch_job(self, uid: str) -> bool:
        """Whether a batch Job still exists."""
        return uid in self._objects[BATCH_JOBS]

    def num_objects(self) -> dict[str, int]:
        """How many objects of each kind are held."""
        return {kind.name: len(objects) for kind, objects in self._objects.items()}

    def _put(self, kind: Kind, held: Held) -> None:
        uid = held.key.uid
        known = self._objects[kind].get(uid)
        if known is not None and known.key.owner_uid != held.key.owner_uid:
            self._drop(kind, uid)
        self._objects[kind][uid] = held
        if held.key.owner_uid:
            self._owned[kind].setdefault(held.key.owner_uid, set()).add(uid)
        if kind == JOBS:
            self._job_uids[JobKey(held.key.namespace, held.key.name)] = uid
        elif kind == PROFILES:
            self._profiles[held.key.name] = uid
        elif kind == BATCH_JOBS and held.key.owner_uid:
            self._job_of_batch_job[uid] = held.key.owner_uid
            self._batch_jobs_of.setdefault(held.key.owner_uid, set()).add(uid)

    def _drop(self, kind: Kind, uid: str) -> None:
        held = self._objects[kind].pop(uid, None)
        if held is None:
            return
        siblings = self._owned[kind].get(held.key.owner_uid)
        if siblings is not None:
            siblings.discard(uid)
            if not siblings:
                del self._owned[kind][held.key.owner_uid]
        if kind == PODS and not self.has_batch_job(held.key.owner_uid) and not self._owned[PODS].get(held.key.owner_uid):
            self._forget_batch_job(held.key.owner_uid)
        elif kind == BATCH_JOBS and not self._owned[PODS].get(uid):
            self._forget_batch_job(uid)
        elif kind == JOBS and self._job_uids.get(JobKey(held.key.namespace, held.key.name)) == uid:
            del self._job_uids[JobKey(held.key.namespace, held.key.name)]
        elif kind == PROFILES and self._profiles.get(held.key.name) == uid:
            del self._profiles[held.key.name]

    def _forget_batch_job(self, uid: str) -> None:
        job_uid = self._job_of_batch_job.pop(uid, None)
        if job_uid is not None:
            self._batch_jobs_of[job_uid].discard(uid)
            if not self._batch_jobs_of[job_uid]:
                del self._batch_jobs_of[job_uid]

    def _forget_job(self, job_uid: str) -> None:
        self.forget_evidence(job_uid, lambda _: True)

    def _job_uid_of_pod(self, held: Held) -> str:
        return self._job_of_batch_job.get(held.key.owner_uid, "")

    def _concerned(self, kind: Kind, held: Held) -> set[JobKey]:
        key = held.key
        if kind == JOBS:
            return {JobKey(key.namespace, key.name)}
        if kind == PROFILES:
            return {
                JobKey(job.key.namespace, job.key.name)
                for job in self._objects[JOBS].values()
                if job.summary is not None and job.summary.profile == key.name and not job.summary.is_finished
            }
        if kind in (BATCH_JOBS, CONFIG_MAPS, SERVICES) and key.owner_kind == JOBS.name:
            return {JobKey(key.namespace, key.owner_name)}
        job = self._objects[JOBS].get(self._job_of_batch_job.get(key.owner_uid, ""))
        return set() if job is None else {JobKey(job.key.namespace, job.key.name)}

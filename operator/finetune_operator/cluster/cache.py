"""The cache of the cluster: one projection per object, by UID, with an index from owner to owned.

It is filled by the first complete list, by every watch event, and by the answers to our own writes and reads. The answers keep
a pass from creating a child twice because its creation has not come back through a watch yet. An object never goes back to an
older resourceVersion. A pod that was deleted is kept, marked `gone`, as evidence of how it ended: the Job controller deletes
the others as soon as one rank fails, and their reports must reach the status first.

Children are watched by a label that anybody may write or remove, so the label never proves two things:
* that an object is ours. Its content is looked at only if its controller is a FineTuneJob (or a Job of one) that is known, of
  the same namespace; an object that merely claims it is kept as a bare key until a pass of that job has looked it up;
* that an object is gone. An object that a watch or list no longer shows, and that was not being deleted, is in doubt until a
  pass has looked it up.

It is used from one event loop. The watch thread calls only `read`; it and the metrics thread read single entries and whole
dictionaries, which the interpreter's lock makes safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from finetune_operator.cluster.kinds import BATCH_JOBS, CHILDREN, CONFIG_MAPS, JOBS, PODS, PROFILES, SERVICES, JobKey, Kind
from finetune_operator.cluster.object_key import ObjectKey, UnreadableObjectError, object_key
from finetune_operator.cluster.projection import CachedObject, project
from finetune_operator.cluster.raw_objects import Fields, UnreadableObjects
from finetune_operator.cluster.store import Store

__all__ = ["Cache", "CachedChild", "JobKey"]

TOMBSTONE_SECONDS = 900.0
"""How long the UID of a deleted object is remembered, so that a list begun before its deletion cannot bring it back."""
CONTROLLED = (BATCH_JOBS, CONFIG_MAPS, SERVICES)
"""Kinds that a FineTuneJob controls itself."""


class CachedChild(NamedTuple):
    """An object of a FineTuneJob."""

    kind: Kind
    held: CachedObject


class Cache(Store):
    """Projections of all watched objects, and the rules for which news to believe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, unreadable: UnreadableObjects | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._unreadable = unreadable or UnreadableObjects()
        self._tombstones: dict[str, tuple[int, float]] = {}
        """UID of a deleted object -> version from which on a state of it proves that it exists after all, and when it was
        buried."""
        self.pods_leave: Callable[[str], None] = lambda _: None
        """Called with the UID of a FineTuneJob before it, or a pod of it, is forgotten."""
        self.job_gone: Callable[[str], None] = lambda _: None
        """Called with the UID of a FineTuneJob that is gone, for those that keep notes about it."""

    def read(self, kind: Kind, document: Any) -> CachedObject | None:
        """Project an object, whatever it contains; None if it is not ours or not even its identity can be read."""
        key = self.key_of(kind, document)
        if key is None:
            return None
        known = self._objects[kind].get(key.uid)
        if known is not None and known.key.version >= key.version and not self.is_in_doubt(known) and not known.is_gone:
            return known
        if kind not in CHILDREN or self._job_of(kind, key):
            cached = project(kind, document)
            if cached.unreadable:
                self._unreadable.note(kind, document, cached.unreadable)
            return cached
        says_it_is_ours = key.is_controlled_by(BATCH_JOBS if kind == PODS else JOBS) and not self._is_owner_known(kind, key)
        return CachedObject(key, is_bare=True) if says_it_is_ours or known is not None else None

    def key_of(self, kind: Kind, document: Any) -> ObjectKey | None:
        """Identity and owner of an object, or None where they cannot be read."""
        try:
            return object_key(document)
        except UnreadableObjectError as error:
            self._unreadable.note(kind, document, (str(error),))
            return None

    def take(self, kind: Kind, document: Any) -> set[JobKey]:
        """Take in an object as the API server has just given it."""
        cached = self.read(kind, document)
        return set() if cached is None else self.apply(kind, cached)

    def apply(self, kind: Kind, cached: CachedObject) -> set[JobKey]:
        """Take in a newer state of an object. Returns the jobs to reconcile; none where nothing is new."""
        uid, version = cached.key.uid, cached.key.version
        known = self._objects[kind].get(uid)
        buried = self._tombstones.get(uid)
        if buried is not None and version < buried[0]:
            return set()
        if known is not None and buried is None and not (known.key.version < version or self._is_shown_again(known, cached)):
            return set()
        self._tombstones.pop(uid, None)
        was_in_doubt = self._in_doubt.pop(uid, None) is not None
        if cached.is_bare and known is not None and not known.is_bare:
            # Its owner reference was removed, or the owner is gone.
            self._drop(kind, uid)
            return self._concerned(kind, known.key)
        self._put(kind, cached)
        is_news = known is None or was_in_doubt or replace(known, key=replace(known.key, version=version)) != cached
        return self._concerned(kind, cached.key) if is_news else set()

    def remove(self, kind: Kind, cached: CachedObject) -> set[JobKey]:
        """Take in that a watch reports the deletion of an object, with its last state. Returns the jobs to reconcile.

        A watch reports the same when a label was removed, with the state before that. So a child whose deletion was not
        requested is only in doubt: the next pass of its job looks it up.
        """
        uid, version = cached.key.uid, cached.key.version
        known = self._objects[kind].get(uid)
        if known is None:
            if kind in CHILDREN and not self._job_of(kind, cached.key):
                return set()
            if kind != PODS or cached.is_bare or uid in self._tombstones:
                self._tombstones.setdefault(uid, (version, self._clock()))
                return set()
            # Its creation was missed, but its report is evidence all the same.
            self._put(kind, known := cached)
        if known.key.version > version or (known.key.version == version and _is_unlabelled(kind, known)):
            # A later state than this event was shown: the object exists, without the label.
            return set()
        if kind not in CHILDREN or cached.key.is_deleting or not self._job_of(kind, known.key):
            return self.bury(kind, cached)
        if not cached.is_bare:
            self._put(kind, cached)
        self._in_doubt[uid] = version
        return self._concerned(kind, cached.key)

    def found(self, kind: Kind, document: Any) -> bool:
        """Take in an object from a live read, which overrides watches and lists. Returns whether it is ours."""
        cached = self.read(kind, document)
        if cached is None or cached.is_bare:
            self._drop(kind, Fields(document).at("metadata").name("uid"))
            return False
        self._tombstones.pop(cached.key.uid, None)
        self.apply(kind, cached)
        self._in_doubt.pop(cached.key.uid, None)
        return True

    def found_gone(self, kind: Kind, uid: str) -> None:
        """Take in that, by a live read, the object does not exist any more."""
        known = self._objects[kind].get(uid)
        if known is not None:
            self.bury(kind, known)

    def bury(self, kind: Kind, cached: CachedObject) -> set[JobKey]:
        """Take in that an object is certainly gone. Returns the jobs to reconcile."""
        uid = cached.key.uid
        if uid not in self._objects[kind]:
            return set()
        self._tombstones[uid] = (max(cached.key.version, self._in_doubt.pop(uid, 0)), self._clock())
        concerned = self._concerned(kind, cached.key)
        if kind == JOBS:
            self.pods_leave(uid)
        if kind == PODS and cached.pod is not None and self._job_of(kind, cached.key):
            self._put(kind, replace(cached, pod=replace(cached.pod, gone=True)))
        else:
            self._drop(kind, uid)
        if kind == JOBS:
            self._forget_job(uid)
        return concerned

    def remove_missing(self, kind: Kind, present: set[str], list_version: int, namespaces: tuple[str, ...] = ()) -> set[JobKey]:
        """Remove what a complete list at that version does not contain. Returns the jobs that this concerns."""
        concerned: set[JobKey] = set()
        for uid, cached in list(self._objects[kind].items()):
            gone = cached.is_gone or _is_unlabelled(kind, cached) or uid in self._in_doubt
            watched = not namespaces or not kind.namespaced or cached.key.namespace in namespaces
            if uid not in present and not gone and watched and cached.key.version <= list_version:
                concerned |= self._miss(kind, cached)
        oldest = self._clock() - TOMBSTONE_SECONDS
        for uid in [uid for uid, (_, buried) in self._tombstones.items() if buried < oldest]:
            if uid not in self._objects[PODS]:
                del self._tombstones[uid]
        return concerned

    def is_news(self, kind: Kind, key: ObjectKey) -> bool:
        """Whether a state of an object of ours is newer than what is known."""
        known = self._objects[kind].get(key.uid)
        if known is not None:
            return known.key.version < key.version
        ours = kind not in CHILDREN or bool(self._job_of(kind, key))
        return ours and self._tombstones.get(key.uid, (0, 0.0))[0] <= key.version

    def forget_evidence(self, job_uid: str, is_settled: Callable[[CachedObject], bool]) -> None:
        """Drop deleted pods of a job whose outcome no later pass can need, as `is_settled` says."""
        settled = [
            cached for cached in self.pods_of(job_uid) if cached.pod is not None and cached.pod.gone and is_settled(cached)
        ]
        if settled:
            self.pods_leave(job_uid)
        for cached in settled:
            self._drop(PODS, cached.key.uid)

    def to_look_up(self, job_uid: str) -> list[CachedChild]:
        """Children whose state only a live read can show: bare keys, those in doubt, and those whose events never come because
        they lack the label by which they are watched.
        """
        children = [CachedChild(kind, cached) for kind in CONTROLLED for cached in self._all_owned(kind, job_uid)]
        children += [
            CachedChild(PODS, cached)
            for batch_job in self._batch_jobs_of.of(job_uid)
            for cached in self._all_owned(PODS, batch_job)
        ]
        return [
            child for child in children if self.is_in_doubt(child.held) or not (child.held.key.is_labelled or child.held.is_gone)
        ]

    def fingerprint(self, job_uid: str) -> frozenset[tuple[str, int]]:
        """Return a value that changes whenever a Job or pod of that job does."""
        children = self._all_owned(BATCH_JOBS, job_uid) + self.pods_of(job_uid)
        return frozenset((child.key.uid, child.key.version) for child in children)

    def is_in_doubt(self, cached: CachedObject) -> bool:
        """Whether this object has to be looked up before the next pass."""
        return cached.is_bare or cached.key.uid in self._in_doubt

    def _miss(self, kind: Kind, cached: CachedObject) -> set[JobKey]:
        """Take in that a complete list does not show an object. Any later state than the known one proves that it exists."""
        if kind in CHILDREN and not cached.key.is_deleting and self._job_of(kind, cached.key):
            self._in_doubt[cached.key.uid] = cached.key.version + 1
            return self._concerned(kind, cached.key)
        return self.bury(kind, cached)

    def _is_shown_again(self, known: CachedObject, cached: CachedObject) -> bool:
        is_same_version = known.key.version == cached.key.version
        return is_same_version and (
            (known.is_bare and not cached.is_bare) or self._in_doubt.get(cached.key.uid) == cached.key.version
        )

    def _forget_job(self, job_uid: str) -> None:
        """Forget what a job leaves behind, because no watch shows what lacks our label."""
        for kind, cached in self.to_look_up(job_uid):
            self._drop(kind, cached.key.uid)
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


def _is_unlabelled(kind: Kind, cached: CachedObject) -> bool:
    """Whether no watch shows the object."""
    return kind in CHILDREN and not cached.key.is_labelled

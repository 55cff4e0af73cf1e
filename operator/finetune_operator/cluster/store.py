"""The objects that the cache holds, with an index from owner to owned and the lines of waiting jobs.

What an object says about itself is trusted here, except for its owner: an index entry proves nothing, `_job_of` does.
"""

from __future__ import annotations

from collections import OrderedDict

from finetune_operator.cluster.kinds import BATCH_JOBS, JOBS, PODS, PROFILES, WATCHED, JobKey, Kind
from finetune_operator.cluster.object_key import ObjectKey
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.cluster.waiting_line import WaitingLines
from finetune_operator.decide.children_seen import PodView

MOST_IN_A_TUPLE = 8
"""Most owned objects that are kept in a tuple. Nearly every owner owns fewer, and a set would cost at least four times the
memory."""


class OwnerIndex:
    """Owner UID -> UIDs of what it owns."""

    def __init__(self) -> None:
        self._owned: dict[str, tuple[str, ...] | set[str]] = {}

    def add(self, owner: str, uid: str) -> None:
        """Note that the owner owns it."""
        known = self._owned.get(owner, ())
        if uid in known:
            return
        if isinstance(known, set):
            known.add(uid)
        else:
            self._owned[owner] = (*known, uid) if len(known) < MOST_IN_A_TUPLE else {*known, uid}

    def discard(self, owner: str, uid: str) -> None:
        """Forget that the owner owns it, if it was known."""
        known = self._owned.get(owner, ())
        left = tuple(other for other in known if other != uid) if len(known) <= MOST_IN_A_TUPLE else known
        if isinstance(left, set):
            left.discard(uid)
        elif left:
            self._owned[owner] = left
        else:
            self._owned.pop(owner, None)

    def of(self, owner: str) -> list[str]:
        """UIDs of what the owner owns, sorted."""
        return sorted(self._owned.get(owner, ()))

    def __contains__(self, owner: object) -> bool:
        """Whether the owner owns anything."""
        return owner in self._owned

    def __len__(self) -> int:
        """How many owners own something."""
        return len(self._owned)


MOST_BARE_KEYS = 10_000
"""Number of objects with an unknown owner that are kept; the relist finds a forgotten one that turns out to be ours."""


class Store:
    """Objects by kind and UID."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[str, CachedObject]] = {kind: {} for kind in WATCHED}
        self._owned = {kind: OwnerIndex() for kind in WATCHED}
        self._job_uids: dict[JobKey, str] = {}
        self._profiles: dict[str, str] = {}
        self._job_of_batch_job: dict[str, str] = {}
        """UID of a batch Job -> UID of its FineTuneJob, kept while pods of it are known."""
        self._batch_jobs_of = OwnerIndex()
        """UID of a FineTuneJob -> UIDs of its batch Jobs, kept as long."""
        self._bare: OrderedDict[str, Kind] = OrderedDict()
        self._in_doubt: dict[str, int] = {}
        """UID of an object that no watch shows any more -> version of the event that said so."""
        self.lines = WaitingLines(self._objects[JOBS], self._most_active_jobs)

    def job(self, key: JobKey) -> CachedObject | None:
        """The FineTuneJob of that name."""
        uid = self._job_uids.get(key)
        return None if uid is None else self._objects[JOBS].get(uid)

    def has_job(self, uid: str) -> bool:
        """Whether a FineTuneJob exists."""
        return uid in self._objects[JOBS]

    def jobs(self) -> list[CachedObject]:
        """Every FineTuneJob."""
        return list(self._objects[JOBS].values())

    def job_of_uid(self, uid: str) -> CachedObject | None:
        """The FineTuneJob of that UID."""
        return self._objects[JOBS].get(uid)

    def job_keys(self) -> list[JobKey]:
        """Keys of every FineTuneJob."""
        return list(self._job_uids)

    def profiles(self) -> list[CachedObject]:
        """Every FineTuneProfile."""
        return list(self._objects[PROFILES].values())

    def profile(self, name: str) -> CachedObject | None:
        """The FineTuneProfile of that name."""
        uid = self._profiles.get(name)
        return None if uid is None else self._objects[PROFILES].get(uid)

    def _most_active_jobs(self, profile: str) -> int | None:
        cached = self.profile(profile)
        return cached.profile.max_active_jobs if cached is not None and cached.profile is not None else None

    def owned(self, kind: Kind, owner_uid: str) -> list[CachedObject]:
        """Objects whose controller owner has that UID, as far as that is proved."""
        return [cached for cached in self._all_owned(kind, owner_uid) if not cached.is_bare]

    def pods_of(self, job_uid: str) -> list[CachedObject]:
        """Pods of every batch Job of a FineTuneJob, gone ones included."""
        return [cached for batch_job in self._batch_jobs_of.of(job_uid) for cached in self.owned(PODS, batch_job)]

    def batch_job_uids_of(self, job_uid: str) -> set[str]:
        """UIDs of every batch Job of a FineTuneJob of which the Job or a pod is known."""
        return set(self._batch_jobs_of.of(job_uid))

    def is_known(self, kind: Kind, key: ObjectKey) -> bool:
        """Whether this state of the object, or a later one, is held."""
        cached = self._objects[kind].get(key.uid)
        return cached is not None and not cached.is_bare and cached.key.version >= key.version

    def is_watched(self, kind: Kind, uid: str) -> bool:
        """Whether the object is held and has the label by which events of it come."""
        cached = self._objects[kind].get(uid)
        return cached is not None and cached.key.is_labelled and uid not in self._in_doubt

    def pod(self, key: ObjectKey) -> PodView | None:
        """The pod, if it is held."""
        cached = self._objects[PODS].get(key.uid)
        return None if cached is None else cached.pod

    def num_objects(self) -> dict[str, int]:
        """How many objects of each kind are held."""
        return {kind.name: len(objects) for kind, objects in self._objects.items()}

    def job_key_of(self, kind: Kind, uid: str) -> JobKey | None:
        """The FineTuneJob of a known Job or pod."""
        cached = self._objects[kind].get(uid)
        job = None if cached is None else self._objects[JOBS].get(self._job_of(kind, cached.key))
        return None if job is None else JobKey(job.key.namespace, job.key.name)

    def _all_owned(self, kind: Kind, owner_uid: str) -> list[CachedObject]:
        objects = self._objects[kind]
        return [objects[uid] for uid in self._owned[kind].of(owner_uid)]

    def _job_of(self, kind: Kind, key: ObjectKey) -> str:
        """UID of the FineTuneJob that a child belongs to by its controller reference; empty where that is not proved.

        References do not reach across namespaces: an object that names an owner in another is not its child.
        """
        if kind == PODS:
            job_uid = self._job_of_batch_job.get(key.owner_uid, "") if key.is_controlled_by(BATCH_JOBS) else ""
        else:
            job_uid = key.owner_uid if key.is_controlled_by(JOBS) else ""
        job = self._objects[JOBS].get(job_uid)
        return job_uid if job is not None and job.key.namespace == key.namespace else ""

    def _is_owner_known(self, kind: Kind, key: ObjectKey) -> bool:
        """Whether the object that it names as its controller is known; then it is also known whether it is ours."""
        return key.owner_uid in (self._job_of_batch_job if kind == PODS else self._objects[JOBS])

    def _put(self, kind: Kind, cached: CachedObject) -> None:
        uid = cached.key.uid
        known = self._objects[kind].get(uid)
        if known is not None and known.key.owner_uid != cached.key.owner_uid:
            self._drop(kind, uid)
        self._objects[kind][uid] = cached
        if cached.key.owner_uid:
            self._owned[kind].add(cached.key.owner_uid, uid)
        self._bare.pop(uid, None)
        if cached.is_bare:
            self._put_bare(kind, uid)
        elif kind == JOBS:
            name = JobKey(cached.key.namespace, cached.key.name)
            if self._may_have_name(cached, JOBS, self._job_uids.get(name)):
                self._job_uids[name] = uid
            if known is not None:
                self.lines.moved(known, cached)
        elif kind == PROFILES and self._may_have_name(cached, PROFILES, self._profiles.get(cached.key.name)):
            self._profiles[cached.key.name] = uid
        elif kind == BATCH_JOBS:
            self._job_of_batch_job[uid] = cached.key.owner_uid
            self._batch_jobs_of.add(cached.key.owner_uid, uid)

    def _may_have_name(self, cached: CachedObject, kind: Kind, named: str | None) -> bool:
        """Whether no later object has the name. Events of an earlier object may come after the next one of its name: only
        events of the same object keep their order, and the answer to a request comes before all of them.
        """
        known = None if named is None else self._objects[kind].get(named)
        return known is None or known.key.version <= cached.key.version

    def _put_bare(self, kind: Kind, uid: str) -> None:
        self._bare[uid] = kind
        if len(self._bare) > MOST_BARE_KEYS:
            oldest, its_kind = self._bare.popitem(last=False)
            self._drop(its_kind, oldest)

    def _drop(self, kind: Kind, uid: str) -> None:
        cached = self._objects[kind].pop(uid, None)
        self._bare.pop(uid, None)
        self._in_doubt.pop(uid, None)
        if cached is None:
            return
        owner_uid = cached.key.owner_uid
        self._owned[kind].discard(owner_uid, uid)
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
            self._batch_jobs_of.discard(job_uid, uid)

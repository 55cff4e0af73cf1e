"""Reads what watches do not show, before a pass: everything that is running, labels of namespaces, and conditions of nodes.

If somebody merely removes the label of a child, a watch with a label selector reports a deletion, and nothing about that child
from then on. So before another Job is created, lists without the selector show what is still running.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

from finetune_job.names import LABEL_JOB_UID, network_policy_name
from finetune_operator.cache.cache import Cache
from finetune_operator.client.answers import ApiError
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import BATCH_JOBS, JOBS, NAMESPACES, NETWORK_POLICIES, NODES, PODS, Kind
from finetune_operator.client.object_key import ObjectKey, labelled_job_uid
from finetune_operator.client.raw_objects import Fields
from finetune_operator.decide.seen.children_seen import BatchJobView, LiveChildren, LiveJob, LivePod, PolicyView
from finetune_operator.decide.seen.observed import JobView, NamespaceView, NodeConditionView, NodeView
from finetune_operator.decide.seen.stage import current_role
from finetune_operator.logs import logger
from finetune_operator.passes.notes import JobNotes, LiveList

UNWATCHED_SECONDS = 15.0
"""How long a live list is valid if it shows an object that is not watched because it has no label or no owner."""
LISTED_SECONDS = 60.0
"""How long any other live list is valid, unless an event reports a change to what it shows."""
_log = logger(__name__)
_FIX_OF_NODES = "install the chart with rbac.readNodes=true, or remove gpu.faultConditions from the profile"
STILL_RUNS = "status.phase!=Succeeded,status.phase!=Failed"


class LiveReads:
    """Reads children, and stores them in the cache."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

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
        pods = await self._api.list(PODS, job.namespace, label_selector=f"{LABEL_JOB_UID}={job.uid}")
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
        """Whether a child with that name exists and is ours. Lists may not show it, because it lacks our label."""
        document = await self._api.get(kind, namespace, name)
        return document is not None and self._cache.found(kind, document)

    async def children(self, job: JobView, notes: JobNotes, now: datetime) -> LiveChildren:
        """List Jobs and pods without a label selector, filtered by owner UID, unless an earlier list is still valid."""
        listed = notes.listed
        if listed is not None:
            valid_seconds = LISTED_SECONDS if listed.is_watched else UNWATCHED_SECONDS
            is_young = (now - listed.at).total_seconds() < valid_seconds
            if is_young and listed.fingerprint == self._cache.fingerprint(job.uid):
                return listed.children
        batch_jobs = [key for key, _ in await self._list(BATCH_JOBS, job.namespace) if _is_controlled_by(key, job.uid)]
        for key in batch_jobs:
            # A Job without the label counts as deleted, because no watch would show how it ends.
            if key.is_labelled and not self._cache.is_known(BATCH_JOBS, key):
                await self._read(BATCH_JOBS, key)
        known = {key.uid for key in batch_jobs} | self._cache.batch_job_uids_of(job.uid)
        pods = [
            await self._live_pod(key, item)
            for key, item in await self._list(PODS, job.namespace, field_selector=STILL_RUNS)
            if (key.owner_uid in known or (labelled_job_uid(item) == job.uid and _may_be_ours(key)))
            # Some servers return more than what the field selector selects.
            and Fields(item).at("status").text("phase", 32) not in ("Succeeded", "Failed")
        ]
        by_name = attrgetter("name")
        children = LiveChildren(
            batch_jobs=tuple(sorted((LiveJob(key.name, key.uid, key.is_deleting) for key in batch_jobs), key=by_name)),
            running_pods=tuple(sorted((pod for pod in pods if pod is not None), key=by_name)),
        )
        shown = [(BATCH_JOBS, child.uid) for child in children.batch_jobs] + [
            (PODS, child.uid) for child in children.running_pods
        ]
        is_watched = all(self._cache.is_watched(kind, uid) for kind, uid in shown)
        # A list that shows nothing to wait for is not reused, so a new list is made before each creation: a Job created later may
        # already be gone again without a trace in the cache, while its pods remain.
        role = current_role(job.status)
        others = {
            cached.key.uid
            for cached in self._cache.owned(BATCH_JOBS, job.uid)
            if cached.batch_job and cached.batch_job.role != role
        }
        is_kept = bool(children.running_pods) or any(child.uid not in others for child in children.batch_jobs)
        notes.listed = LiveList(children, self._cache.fingerprint(job.uid), now, is_watched) if is_kept else None
        return children

    async def _list(self, kind: Kind, namespace: str, **selector: str) -> list[tuple[ObjectKey, Any]]:
        items = await self._api.list(kind, namespace, metadata_only=True, **selector)
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


async def namespace_view(api: Api, name: str) -> NamespaceView:
    """Read the labels of a namespace, or return why they cannot be read. Namespaces are not watched: few profiles have a
    selector, and only jobs that have not begun need the labels. Raises ApiUnreachableError, and ApiError except for a missing
    permission.
    """
    try:
        document = await api.get(NAMESPACES, None, name)
    except ApiError as error:
        if error.code != 403:
            raise
        return NamespaceView(error=f"it has no permission to get namespaces: {error.message}")
    if document is None:
        return NamespaceView(error="it does not exist")
    labels = Fields(document).at("metadata").at("labels").raw
    return NamespaceView({key: value for key, value in labels.items() if isinstance(value, str)})


async def read_nodes(api: Api, names: Sequence[str]) -> tuple[NodeView, ...]:
    """Read the conditions of nodes, which are not watched, up to the first read that fails. Raises ApiUnreachableError."""
    nodes: list[NodeView] = []
    for name in names:
        try:
            document = await api.get(NODES, None, name)
        except ApiError as error:
            fix = {"fix": _FIX_OF_NODES} if error.code == 403 else {}
            _log.warning("the conditions of a node cannot be read", node=name, error=str(error), **fix)
            return tuple(nodes)
        conditions = (
            NodeConditionView(
                type=condition.text("type", 316),
                status=condition.text("status", 16),
                reason=condition.text("reason", 128),
                message=condition.text("message", 512),
                since=condition.time("lastTransitionTime"),
            )
            for condition in Fields(document).at("status").items("conditions")
        )
        nodes.append(NodeView(name, tuple(conditions)))
    return tuple(nodes)


def _is_controlled_by(key: ObjectKey, job_uid: str) -> bool:
    return key.owner_uid == job_uid and key.is_controlled_by(JOBS)


def _may_be_ours(key: ObjectKey) -> bool:
    """Whether a pod with our label and an unknown controller may belong to a deleted Job; a ReplicaSet's pod cannot."""
    return not key.owner_uid or key.is_controlled_by(BATCH_JOBS)

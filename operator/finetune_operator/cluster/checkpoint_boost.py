"""Tells Kueue how much a training run would lose if it were preempted now: the annotation `priority-boost` of its Workload.

Of two runs of the same priority a queue then preempts the one that has just saved. How much it is, `decide.priority_boost` says.
A Job that waits has nothing to lose, so its boost goes back to 0: with what is left of one it would preempt others in its turn.

Only for plans that ask for it (`kueue.checkpointPriorityBoost` of the profile); where none does there is no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

from finetune_job.names import Role, plan_configmap_name
from finetune_job.plan.launch_plan import CheckpointInterval
from finetune_job.progress import Progress
from finetune_operator.cluster.answers import ApiError
from finetune_operator.cluster.api import Api
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.kinds import BATCH_JOBS, CONFIG_MAPS, Kind
from finetune_operator.cluster.projection import CachedObject, utc_now
from finetune_operator.cluster.raw_objects import Fields
from finetune_operator.cluster.reader import Reader
from finetune_operator.cluster.workloads import ABSENT_SECONDS, Workloads
from finetune_operator.decide.children_seen import BatchJobView, PodView
from finetune_operator.decide.frozen_plan import PlanLost, frozen_plan
from finetune_operator.decide.observed import Observed, ProfileView
from finetune_operator.decide.progress import priority_boost
from finetune_operator.logs import logger

_log = logger(__name__)
BOOST_ANNOTATION = "kueue.x-k8s.io/priority-boost"
PERIOD_SECONDS = 15.0
PAUSE_SECONDS = 0.1
"""Between one Workload and the next. With thousands of them a round takes longer, and each is told less often."""
PLAN_FIELD = "checkpoint_priority_boost"
"""Absent from a plan that does not ask for it: see `PlacementModel`."""
LONGEST_BOOST = 64
"""Characters. Kueue takes 32 bits; anything longer differs from what is to stand there all the same."""


class ProgressSource(Protocol):
    """Who runs, and what it told; `ProgressPoll`."""

    def rank_zero(self, held: CachedObject) -> PodView | None:
        """The pod of rank 0 of the current training attempt, if it runs."""

    def progress_of(self, held: CachedObject, pod: PodView) -> Progress | None:
        """What that pod told last."""


class _BoostRequest(NamedTuple):
    """What a plan asks for."""

    most: int
    interval: CheckpointInterval


@dataclass(frozen=True)
class _WrittenBoost:
    """A Workload, and the boost that it has."""

    kind: Kind
    name: str
    uid: str
    boost: str


class CheckpointBoost:
    """One round looks at every job that trains. A Workload is read once; then what was written last is taken to stand there."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        pods: ProgressSource,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._api = api
        self._cache = cache
        self._pods = pods
        self._sleep = sleep
        self._now = now
        self._workloads = Workloads(api)
        self._wishes: dict[str, tuple[str, _BoostRequest | None]] = {}
        """UID of a FineTuneJob -> UID of the ConfigMap with its plan, and what that asks for: reading one takes a millisecond."""
        self._told: dict[str, _WrittenBoost] = {}
        """By UID of the train Job."""
        self._absent_until: dict[str, datetime] = {}
        """The same of Jobs without a Workload."""
        self._refused_until: dict[str, datetime] = {}
        """By namespace."""
        self._is_refusal_logged = False

    async def run(self) -> None:
        """Until cancelled. Raises ApiUnreachableError; what is known is kept for when it is called again."""
        while True:
            await self._round()
            await self._sleep(PERIOD_SECONDS)

    async def _round(self) -> None:
        training = [held for held in self._cache.jobs() if held.summary is not None and held.summary.is_training]
        for uid in self._wishes.keys() - {held.key.uid for held in training}:
            del self._wishes[uid]
        followed: set[str] = set()
        refusals: list[ApiError] = []
        for held in training:
            wish = await self._wish(held)
            if wish is None:
                continue
            batch_job = self._train_job(held)
            if batch_job is None:
                continue
            followed.add(batch_job.uid)
            boost = self._boost(held, batch_job, wish)
            if boost is None or not self._is_due(batch_job.uid, held.key.namespace, str(boost)):
                continue
            try:
                await self._tell(batch_job.uid, held.key.namespace, str(boost))
            except ApiError as error:
                # Such as a webhook of Kueue's that is away.
                refusals.append(error)
            await self._sleep(PAUSE_SECONDS)
        if refusals:
            _log.warning("priority boosts not written: tried again", workloads=len(refusals), error=str(refusals[-1]))
        for uid in self._told.keys() - followed:
            del self._told[uid]
        now = self._now()
        self._absent_until = {uid: until for uid, until in self._absent_until.items() if uid in followed and now < until}
        self._refused_until = {namespace: until for namespace, until in self._refused_until.items() if now < until}

    async def _wish(self, held: CachedObject) -> _BoostRequest | None:
        """What the plan of a job asks for; None: nothing."""
        name = plan_configmap_name(held.key.name)
        config_map = next((one for one in self._cache.owned(CONFIG_MAPS, held.key.uid) if one.key.name == name), None)
        if config_map is None:
            return None
        known = self._wishes.get(held.key.uid)
        if known is None or known[0] != config_map.key.uid:
            # At its start the operator has all plans to read, and is not to stop for that.
            await asyncio.sleep(0)
            known = (config_map.key.uid, _read_wish(held, config_map))
            self._wishes[held.key.uid] = known
        return known[1]

    def _train_job(self, held: CachedObject) -> BatchJobView | None:
        """The Job of the current attempt, unless it has ended."""
        for item in self._cache.owned(BATCH_JOBS, held.key.uid):
            job = item.batch_job
            if job is None or held.summary is None or job.role is not Role.TRAIN or job.attempt != held.summary.job_number:
                continue
            return None if job.deleting or job.has("Complete", "Failed") else job
        return None

    def _boost(self, held: CachedObject, batch_job: BatchJobView, wish: _BoostRequest) -> int | None:
        """None: not known, because the run has told nothing since it began, or since the operator did."""
        pod = None if batch_job.suspended else self._pods.rank_zero(held)
        if pod is None:
            return 0
        progress = self._pods.progress_of(held, pod)
        return None if progress is None else priority_boost(wish.most, progress, wish.interval)

    def _is_due(self, uid: str, namespace: str, boost: str) -> bool:
        """Whether the Workload of the Job of that UID is to be looked for, or written to."""
        told = self._told.get(uid)
        if told is None:
            return self._is_over(self._absent_until.get(uid))
        return told.boost != boost and self._is_over(self._refused_until.get(namespace))

    def _is_over(self, until: datetime | None) -> bool:
        return until is None or self._now() >= until

    async def _tell(self, uid: str, namespace: str, boost: str) -> None:
        told = self._told.get(uid) or await self._look(uid, namespace)
        if told is None:
            self._absent_until[uid] = self._now() + timedelta(seconds=ABSENT_SECONDS)
            return
        self._told[uid] = told
        if not self._is_due(uid, namespace, boost):
            return
        # The UID is a precondition: the name may be another's by now.
        metadata = {"uid": told.uid, "annotations": {BOOST_ANNOTATION: boost}}
        try:
            await self._api.patch(told.kind, namespace, told.name, {"metadata": metadata})
        except ApiError as error:
            if error.is_not_found or error.is_conflict:
                # Looked for again in the next round.
                del self._told[uid]
                return
            if error.code != 403:
                raise
            self._refused_until[namespace] = self._now() + timedelta(seconds=ABSENT_SECONDS)
            if not self._is_refusal_logged:
                fix = "install the chart with kueue.patchWorkloads=true, or take checkpointPriorityBoost out of the profile"
                _log.warning("priority boosts may not be written", namespace=namespace, fix=fix, error=str(error))
            self._is_refusal_logged = True
            return
        self._told[uid] = replace(told, boost=boost)
        self._is_refusal_logged = False

    async def _look(self, uid: str, namespace: str) -> _WrittenBoost | None:
        found = await self._workloads.of_job(uid, namespace, self._now())
        if found is None:
            return None
        metadata = Fields(found.document).at("metadata")
        # To Kueue no annotation is a boost of 0.
        boost = metadata.at("annotations").text(BOOST_ANNOTATION, LONGEST_BOOST) or "0"
        return _WrittenBoost(found.kind, metadata.name("name"), metadata.name("uid"), boost)


def _read_wish(held: CachedObject, config_map: CachedObject) -> _BoostRequest | None:
    # A reader of its own: one that remembers would hold plans that are read once.
    reader = Reader()
    plan = reader.plan(config_map)
    if PLAN_FIELD not in plan.plan_json:
        return None
    run = frozen_plan(Observed(reader.job(held).view, ProfileView(""), plan=plan))
    if isinstance(run, PlanLost) or not run.placement.checkpoint_priority_boost:
        return None
    return _BoostRequest(run.placement.checkpoint_priority_boost, run.plan.checkpoint)

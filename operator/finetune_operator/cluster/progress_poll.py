"""Asks rank 0 of every running training attempt how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

import aiohttp

from finetune_job.names import OBSERVE_PORT, Role
from finetune_job.progress import Progress
from finetune_operator.cluster.answers import read_at_most
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.cluster.gather import Gatherer
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.decide.children_seen import PodView

CONCURRENT_POLLS = 32
ANSWER_SECONDS = 2.0
"""A rank that is busy answers within milliseconds; one that does not answer is asked again in the next round."""
LARGEST_ANSWER_BYTES = 65_536


class ProgressPoll:
    """One round asks every job once; the pause between rounds grows with the number of jobs."""

    def __init__(
        self,
        cache: Cache,
        gatherer: Gatherer,
        wake: Callable[[JobKey], None],
        *,
        period: float,
        longest: float,
        writes_per_second: float,
    ) -> None:
        self._cache = cache
        self._gatherer = gatherer
        self._wake = wake
        self._period = period
        self._longest = longest
        self._writes_per_second = writes_per_second
        self._told: dict[str, Progress] = {}
        """Job UID -> the progress that was passed on last."""

    async def run(self) -> None:
        """Poll until cancelled."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while True:
                num_polled = await self._round(session)
                await asyncio.sleep(min(max(self._period, num_polled / self._writes_per_second), self._longest))

    async def _round(self, session: aiohttp.ClientSession) -> int:
        training = [cached for cached in self._cache.jobs() if cached.summary is not None and cached.summary.is_training]
        for uid in self._told.keys() - {cached.key.uid for cached in training}:
            del self._told[uid]
        limit = asyncio.Semaphore(CONCURRENT_POLLS)

        async def poll(cached: CachedObject) -> bool:
            pod = self._rank_zero(cached)
            if pod is None:
                return False
            async with limit:
                await self._ask(session, cached, pod)
            return True

        return sum(await asyncio.gather(*(poll(cached) for cached in training)))

    def _rank_zero(self, cached: CachedObject) -> PodView | None:
        """The pod of rank 0 of the current training attempt, if it runs.

        A Job adopts every pod with its labels, whoever made it, and deletes surplus pods of an index. Those are asked last.
        """
        number = cached.summary.job_number if cached.summary is not None else -1
        rank_zero: PodView | None = None
        for item in self._cache.pods_of(cached.key.uid):
            pod = item.pod
            if pod is None or pod.role is not Role.TRAIN or pod.attempt != number or pod.node_rank or not pod.pod_ip:
                continue
            if pod.phase == "Running" and not pod.gone and (rank_zero is None or _precedence(pod) > _precedence(rank_zero)):
                rank_zero = pod
        return rank_zero

    async def _ask(self, session: aiohttp.ClientSession, cached: CachedObject, pod: PodView) -> None:
        host = f"[{pod.pod_ip}]" if ":" in pod.pod_ip else pod.pod_ip
        try:
            async with session.get(f"http://{host}:{OBSERVE_PORT}/progress", allow_redirects=False) as response:
                if response.status != 200:
                    return
                progress = Progress.model_validate_json(await read_at_most(response.content, LARGEST_ANSWER_BYTES))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            # Normal while the pod starts, ends or restarts; the deadlines handle a run that hangs.
            return
        uid = cached.key.uid
        if cached.summary is None or progress.attempt != cached.summary.attempt or self._told.get(uid) == progress:
            return
        self._told[uid] = progress
        self._gatherer.note_progress(uid, progress)
        self._wake(JobKey(cached.key.namespace, cached.key.name))


def _precedence(pod: PodView) -> tuple[bool, datetime]:
    return pod.deletion_requested is None, pod.created

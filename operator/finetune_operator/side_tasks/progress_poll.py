"""Asks rank 0 of every running training attempt for its progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from finetune_job.names import OBSERVE_PORT, Role
from finetune_job.progress import Progress
from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import CachedObject
from finetune_operator.client.answers import read_at_most
from finetune_operator.client.kinds import JobKey
from finetune_operator.decide.seen.children_seen import PodView
from finetune_operator.passes.gather import Gatherer

CONCURRENT_POLLS = 32
ANSWER_SECONDS = 2.0
"""Maximum wait for an answer. Even a busy rank answers within milliseconds; one that does not is asked again next round."""
LARGEST_ANSWER_BYTES = 65_536


class ProgressPoll:
    """Asks every job in training once per round. The pause between rounds grows with the number of jobs."""

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
        self._reported: dict[str, Progress] = {}
        """UID of a job -> the progress that was passed on last."""

    async def run(self) -> None:
        """Poll until cancelled."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while True:
                num_polled = await self._round(session)
                await asyncio.sleep(min(max(self._period, num_polled / self._writes_per_second), self._longest))

    async def _round(self, session: aiohttp.ClientSession) -> int:
        training = [cached for cached in self._cache.jobs() if cached.summary is not None and cached.summary.is_training]
        for uid in self._reported.keys() - {cached.key.uid for cached in training}:
            del self._reported[uid]
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
        """Return the pod of rank 0 of the current training attempt, if it is running.

        There may be several such pods: a Job adopts every pod that matches its selector, even if somebody else created it, and
        only later deletes surplus pods of an index. A pod that is being deleted is chosen only if there is no other.
        """
        number = cached.summary.attempt if cached.summary is not None else -1
        pods = [item.pod for item in self._cache.pods_of(cached.key.uid) if item.pod is not None]
        running = [pod for pod in pods if pod.phase == "Running" and not pod.gone and pod.pod_ip]
        ranks_zero = [pod for pod in running if (pod.role, pod.attempt, pod.node_rank) == (Role.TRAIN, number, 0)]
        return max(ranks_zero, key=lambda pod: (pod.deletion_requested is None, pod.created), default=None)

    async def _ask(self, session: aiohttp.ClientSession, cached: CachedObject, pod: PodView) -> None:
        host = f"[{pod.pod_ip}]" if ":" in pod.pod_ip else pod.pod_ip
        try:
            async with session.get(f"http://{host}:{OBSERVE_PORT}/progress", allow_redirects=False) as response:
                if response.status != 200:
                    return
                progress = Progress.model_validate_json(await read_at_most(response.content, LARGEST_ANSWER_BYTES))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            # This is normal while the pod starts, ends or restarts; a run that hangs is handled by the deadlines.
            return
        uid = cached.key.uid
        if cached.summary is None or progress.attempt != cached.summary.attempt or self._reported.get(uid) == progress:
            return
        self._reported[uid] = progress
        self._gatherer.note_progress(uid, progress)
        self._wake(JobKey(cached.key.namespace, cached.key.name))

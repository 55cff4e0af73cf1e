"""Counts what jobs use, from the cache and from the decisions of passes, for the usage counters.

What a status is about to say is recorded first, and counts once the status says it or the job is gone. So neither the end of
this process nor the deletion of a job loses a count or counts twice. `ledger.py` stores the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.names import Role
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.api import Api
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.job_labels import job_labels
from finetune_operator.cluster.ledger import StoredLedger
from finetune_operator.cluster.projection import CachedObject, utc_now
from finetune_operator.cluster.summaries import JobSummary
from finetune_operator.decide.account import GONE, Confirmed, JobAccount, is_news, with_checkpoint, with_decision, with_pods
from finetune_operator.decide.children_seen import PodView
from finetune_operator.decide.job_numbers import job_number
from finetune_operator.decide.observed import JobView
from finetune_operator.decide.stage import attempt_of, is_terminal
from finetune_operator.decide.usage_labels import JobLabels, settled_labels
from finetune_operator.decide.usage_totals import UsageTotals
from finetune_operator.logs import logger

_log = logger(__name__)
PERIOD_SECONDS = 15.0
"""How often the GPU seconds of running jobs are written."""
JOBS_AT_ONCE = 200
"""Jobs that are counted before other tasks get a turn: some milliseconds."""
SETTLED_AFTER = timedelta(seconds=10)
"""How far accounts stay behind the present, so that what watches and kubelets report late is still counted."""


class Accounts:
    """Keeps the accounts. It is used from one event loop; `totals` may be called from any thread."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        namespace: str,
        name: str,
        now: Callable[[], datetime] = utc_now,
        *,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """failed: called periodically while nothing can be recorded."""
        self._cache = cache
        self._now = now
        self._failed = failed
        self._ledger = StoredLedger(api, namespace, name, confirmed_at_end=self._confirmed_at_end, now=now)
        self._hurry = asyncio.Event()
        cache.pods_leave = self.leaves

    def totals(self) -> dict[JobLabels, UsageTotals]:
        """Return the totals by labels. All of them are on record."""
        recorded = self._ledger.recorded
        if recorded is None:
            return {}
        totals = recorded.totals()
        for uid, account in recorded.jobs.items():
            totals[account.labels] = totals.get(account.labels, UsageTotals()).plus(account, self._confirmed(uid))
        return totals

    async def decided(self, job: JobView, after: FineTuneJobStatus | None) -> None:
        """Record what a pass has decided, before it is written into the status.

        Raises ApiError and ApiUnreachableError for a while. After that jobs continue, and what could not be written is kept for
        later.
        """
        if after is None or is_terminal(job.status) or not is_news(job.status, after):
            return
        try:
            await self._put_on_record(job, after)
        except (ApiError, ApiUnreachableError):
            raise
        except Exception:  # noqa: BLE001 - no defect of an account may hold up its job
            _log.exception("usage of a job is not counted", namespace=job.namespace, job=job.name)

    async def _put_on_record(self, job: JobView, after: FineTuneJobStatus) -> None:
        if not await self._ledger.is_open() and self._ledger.recorded is None:
            return
        cached = self._cache.job_of_uid(job.uid)
        if cached is None:
            return
        account = self._account(cached)
        number = job_number(job.status, Role.TRAIN, attempt_of(job.status, Role.TRAIN))
        account = with_pods(account, self._pods(job.uid), number, self._now().timestamp())
        created = cached.summary.created if cached.summary is not None else None
        self._ledger.stage(job.uid, with_decision(account, job.status, after, created))
        await self._ledger.record()

    async def run(self) -> None:
        """Count GPU seconds until cancelled."""
        while True:
            self._hurry.clear()
            if await self._ledger.is_open(probes=True):
                await self._count()
                await self._ledger.record(probes=True)
            if self._ledger.is_uncounted:
                self._failed()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_SECONDS):
                    await self._hurry.wait()

    def leaves(self, uid: str) -> None:
        """Count the pods of a job before they, or the job itself, are forgotten."""
        cached = self._cache.job_of_uid(uid)
        if self._ledger.recorded is None or cached is None or cached.summary is None:
            return
        if cached.summary.is_finished or not cached.summary.is_started:
            return
        self._ledger.stage(uid, self._counted(uid, self._account(cached), cached.summary, self._now()))
        self._hurry.set()

    async def _count(self) -> None:
        until = self._now() - SETTLED_AFTER
        for place, uid in enumerate([cached.key.uid for cached in self._cache.jobs()]):
            if place % JOBS_AT_ONCE == JOBS_AT_ONCE - 1:
                await asyncio.sleep(0)
            # It may be gone by now, and must not come back into the accounts.
            cached = self._cache.job_of_uid(uid)
            summary = cached.summary if cached is not None else None
            if cached is None or summary is None or not summary.is_started or summary.is_finished:
                continue
            before = self._ledger.known(uid)
            account = self._counted(uid, self._account(cached), summary, until)
            if account != before:
                self._ledger.stage(uid, account)

    def _counted(self, uid: str, account: JobAccount, summary: JobSummary, until: datetime) -> JobAccount:
        account = with_pods(account, self._pods(uid), summary.job_number, until.timestamp())
        return with_checkpoint(account, summary.facts.checkpoint)

    def _account(self, cached: CachedObject) -> JobAccount:
        """The known account of a job, or a new one."""
        return self._ledger.known(cached.key.uid) or self._opened(cached)

    def _opened(self, cached: CachedObject) -> JobAccount:
        labels, gpus = job_labels(self._cache, cached)
        summary = cached.summary
        has_profile = summary is not None and summary.is_started and self._cache.profile(summary.profile) is not None
        labels = self._ledger.use(settled_labels(labels, has_profile=has_profile))
        facts = summary.facts if summary is not None else None
        begun = facts.start if facts is not None and facts.start is not None else self._now()
        return JobAccount(labels=labels, gpus=gpus, at=begun.timestamp(), checkpoint=None)

    def _pods(self, uid: str) -> list[PodView]:
        return [cached.pod for cached in self._cache.pods_of(uid) if cached.pod is not None]

    def _summary(self, uid: str) -> JobSummary | None:
        cached = self._cache.job_of_uid(uid)
        return None if cached is None else cached.summary

    def _confirmed(self, uid: str) -> Confirmed:
        summary = self._summary(uid)
        return GONE if summary is None else confirmed_by_summary(summary)

    def _confirmed_at_end(self, uid: str) -> Confirmed | None:
        summary = self._summary(uid)
        return self._confirmed(uid) if summary is None or summary.is_finished else None


def confirmed_by_summary(summary: JobSummary) -> Confirmed:
    """Return what a job's status confirms of the pending entries."""
    return Confirmed(
        summary.facts.has_result, {str(role): number for role, number in zip(Role, summary.facts.attempts, strict=True)}
    )

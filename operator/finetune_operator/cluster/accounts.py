"""Counts what jobs use, from the cache and from what passes decide: the source of the counters.

What a status is about to say is put on record first, and counts once the status says it or its job is gone. So no death of this
process, and no deletion of a job, loses a count or counts twice. `ledger.py` has what is on record.
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
"""Counted without a turn for others: some milliseconds."""
SETTLED_AFTER = timedelta(seconds=10)
"""Accounts are complete up to so long ago: what watches and kubelets tell late is still counted."""


class Accounts:
    """Keeps the accounts. Used from one event loop; `totals` from any thread."""

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
        """failed: called every now and then for as long as nothing can be put on record."""
        self._cache = cache
        self._now = now
        self._failed = failed
        self._ledger = StoredLedger(api, namespace, name, confirmed_at_end=self._confirmed_at_end, now=now)
        self._hurry = asyncio.Event()
        cache.pods_leave = self.leaves

    def totals(self) -> dict[JobLabels, UsageTotals]:
        """What is counted by now, by labels: all of it is on record."""
        recorded = self._ledger.recorded
        if recorded is None:
            return {}
        found = recorded.totals()
        for uid, account in recorded.jobs.items():
            found[account.labels] = found.get(account.labels, UsageTotals()).plus(account, self._confirmed(uid))
        return found

    async def decided(self, job: JobView, after: FineTuneJobStatus | None) -> None:
        """Put on record what a pass has decided, before it is written into the status.

        Raises ApiError and ApiUnreachableError for a while. Then jobs continue, and what could not be written is kept for later.
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
        held = self._cache.job_of_uid(job.uid)
        if held is None:
            return
        account = self._account(held)
        number = job_number(job.status, Role.TRAIN, attempt_of(job.status, Role.TRAIN))
        account = with_pods(account, self._pods(job.uid), number, self._now().timestamp())
        created = held.summary.created if held.summary is not None else None
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
        """Pods of a job are being forgotten, or the job itself is: the last moment to count what they held."""
        held = self._cache.job_of_uid(uid)
        if self._ledger.recorded is None or held is None or held.summary is None:
            return
        if held.summary.is_finished or not held.summary.is_started:
            return
        self._ledger.stage(uid, self._counted(uid, self._account(held), held.summary, self._now()))
        self._hurry.set()

    async def _count(self) -> None:
        until = self._now() - SETTLED_AFTER
        for place, uid in enumerate([held.key.uid for held in self._cache.jobs()]):
            if place % JOBS_AT_ONCE == JOBS_AT_ONCE - 1:
                await asyncio.sleep(0)
            # It may be gone since, and must not come back into the accounts.
            held = self._cache.job_of_uid(uid)
            summary = held.summary if held is not None else None
            if held is None or summary is None or not summary.is_started or summary.is_finished:
                continue
            before = self._ledger.known(uid)
            account = self._counted(uid, self._account(held), summary, until)
            if account != before:
                self._ledger.stage(uid, account)

    def _counted(self, uid: str, account: JobAccount, summary: JobSummary, until: datetime) -> JobAccount:
        account = with_pods(account, self._pods(uid), summary.job_number, until.timestamp())
        return with_checkpoint(account, summary.facts.checkpoint)

    def _account(self, held: CachedObject) -> JobAccount:
        """What is known of a job, or a new account."""
        return self._ledger.known(held.key.uid) or self._opened(held)

    def _opened(self, held: CachedObject) -> JobAccount:
        labels, gpus = job_labels(self._cache, held)
        summary = held.summary
        has_profile = summary is not None and summary.is_started and self._cache.profile(summary.profile) is not None
        labels = self._ledger.use(settled_labels(labels, has_profile=has_profile))
        facts = summary.facts if summary is not None else None
        begun = facts.start if facts is not None and facts.start is not None else self._now()
        return JobAccount(labels=labels, gpus=gpus, at=begun.timestamp(), checkpoint=None)

    def _pods(self, uid: str) -> list[PodView]:
        return [held.pod for held in self._cache.pods_of(uid) if held.pod is not None]

    def _summary(self, uid: str) -> JobSummary | None:
        held = self._cache.job_of_uid(uid)
        return None if held is None else held.summary

    def _confirmed(self, uid: str) -> Confirmed:
        summary = self._summary(uid)
        return GONE if summary is None else confirmed_by_summary(summary)

    def _confirmed_at_end(self, uid: str) -> Confirmed | None:
        summary = self._summary(uid)
        return self._confirmed(uid) if summary is None or summary.is_finished else None


def confirmed_by_summary(summary: JobSummary) -> Confirmed:
    """What a job's status says of pending things."""
    return Confirmed(
        summary.facts.has_result, {str(role): number for role, number in zip(Role, summary.facts.attempts, strict=True)}
    )

"""The accounts of all jobs, and the totals of those that are gone, in one ConfigMap of the release: the source of the counters.

One object, because only then what is added to a total and what is taken off a job's account are one write. What a status is about
to say is written here first, and counts once the status says it or its job is gone. So no death of this process, and no deletion
of a job, loses a count or counts twice; docs/decisions/0022 has the reasons.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.names import Role
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.job_labels import job_labels
from finetune_operator.cluster.kinds import CONFIG_MAPS
from finetune_operator.cluster.projection import CachedObject, utc_now
from finetune_operator.cluster.summaries import JobSummary
from finetune_operator.decide.account import (
    GONE,
    Confirmed,
    JobAccount,
    closed_account,
    is_news,
    with_checkpoint,
    with_decision,
    with_pods,
)
from finetune_operator.decide.observed import JobView, PodView
from finetune_operator.decide.stage import attempt_of, is_terminal
from finetune_operator.decide.uncounted import continues_uncounted, failing_since
from finetune_operator.decide.usage_labels import JobLabels, bounded_labels, settled_labels
from finetune_operator.decide.usage_totals import UsageTotals
from finetune_operator.logs import logger

_log = logger(__name__)
KEY, UNREADABLE = "accounts.json.z", "unreadable.json.z"
"""Of the content, and of one that could not be read, which is kept for people."""
MOST_KEPT_CHARACTERS = 400_000
"""Of what cannot be read, so that there is room for what is counted: an object has a mebibyte."""
PERIOD_SECONDS = 15.0
"""How often the GPU seconds of running jobs are written."""
JOBS_AT_ONCE = 200
"""Counted without a turn for others: some milliseconds."""
SETTLED_AFTER = timedelta(seconds=10)
"""Accounts are complete up to so long ago: what watches and kubelets tell late is still counted."""
MOST_BYTES = 64 << 20
"""Of the content: a hundred times that of 5,000 running jobs. What is longer is cut, and so unreadable."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True)
    labels: JobLabels
    totals: UsageTotals


class Ledger(BaseModel):
    """What is on record."""

    model_config = ConfigDict(frozen=True)
    groups: tuple[_Group, ...] = ()
    """Of jobs that have ended or are gone."""
    jobs: Mapping[str, JobAccount] = Field(default_factory=dict)
    """By UID, of the others."""

    def totals(self) -> dict[JobLabels, UsageTotals]:
        """By labels."""
        return {group.labels: group.totals for group in self.groups}


class _Attempt(NamedTuple):
    """A write."""

    ledger: Ledger
    number: int
    """Of the latest account that was staged for it."""
    staged: Mapping[str, JobAccount]
    closed: Mapping[str, JobAccount]
    """Accounts that it adds to the totals."""


def read_ledger(found: Document) -> Ledger:
    """The content of the ConfigMap. Raises ValueError."""
    try:
        content = zlib.decompressobj().decompress(base64.b64decode(found["binaryData"][KEY]), MOST_BYTES)
        return Ledger.model_validate_json(content)
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(str(error)) from error


def _ledger_of(found: Document) -> Ledger | None:
    """None: it cannot be read."""
    try:
        return read_ledger(found)
    except ValueError as error:
        kept = "" if _content(found, KEY) is None else UNREADABLE
        _log.error("usage is counted from zero: what was on record cannot be read", error=str(error)[:300], kept_as=kept)
        return None


def _content(found: Document | None, key: str) -> str | None:
    """Of an object that anybody may have edited."""
    data = (found or {}).get("binaryData")
    content = data.get(key) if isinstance(data, dict) else None
    return content if isinstance(content, str) and 0 < len(content) <= MOST_KEPT_CHARACTERS else None


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
        self._api = api
        self._cache = cache
        self._namespace = namespace
        self._name = name
        self._now = now
        self._failed = failed
        """Called every now and then for as long as nothing can be put on record."""
        self._object: Document | None = None
        """As the server has it."""
        self._unreadable: str | None = None
        """What was on record once and cannot be read."""
        self._recorded: Ledger | None = None
        """What is on record for certain."""
        self._is_current = False
        """Whether the server is known to have the same."""
        self._attempt: _Attempt | None = None
        """A write of which no answer came."""
        self._staged: dict[str, JobAccount] = {}
        """Accounts that the next write puts on record."""
        self._num_staged = self._num_written = 0
        self._labels: dict[str, set[JobLabels]] = {}
        """That are in use, by namespace."""
        self._lock = asyncio.Lock()
        self._hurry = asyncio.Event()
        self._failing_since: datetime | None = None
        self._is_uncounted = False
        """Whether jobs continue meanwhile. Then only `run` tries to write, so that no pass waits for an answer."""
        cache.pods_leave = self.leaves

    def totals(self) -> dict[JobLabels, UsageTotals]:
        """What is counted by now, by labels: all of it is on record."""
        recorded = self._recorded
        if recorded is None:
            return {}
        found = recorded.totals()
        for uid, account in recorded.jobs.items():
            summary = self._summary(uid)
            confirmed = GONE if summary is None else confirmed_by_summary(summary)
            found[account.labels] = found.get(account.labels, UsageTotals()).plus(account, confirmed)
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
        if not await self._is_open() and self._recorded is None:
            return
        held = self._cache.job_of_uid(job.uid)
        if held is None:
            return
        account = self._account(held)
        account = with_pods(account, self._pods(job.uid), attempt_of(job.status, Role.TRAIN), self._now().timestamp())
        created = held.summary.created if held.summary is not None else None
        self._stage(job.uid, with_decision(account, job.status, after, created))
        await self._record()

    async def run(self) -> None:
        """Count GPU seconds until cancelled."""
        while True:
            self._hurry.clear()
            if await self._is_open(probes=True):
                await self._count()
                await self._record(probes=True)
            if self._is_uncounted:
                self._failed()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_SECONDS):
                    await self._hurry.wait()

    def leaves(self, uid: str) -> None:
        """Pods of a job are being forgotten, or the job itself is: the last moment to count what they held."""
        held = self._cache.job_of_uid(uid)
        if self._recorded is None or held is None or held.summary is None:
            return
        if held.summary.is_finished or not held.summary.is_started:
            return
        self._stage(uid, self._counted(uid, self._account(held), held.summary, self._now()))
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
            before = self._known(uid)
            account = self._counted(uid, self._account(held), summary, until)
            if account != before:
                self._stage(uid, account)

    def _counted(self, uid: str, account: JobAccount, summary: JobSummary, until: datetime) -> JobAccount:
        account = with_pods(account, self._pods(uid), summary.attempt, until.timestamp())
        return with_checkpoint(account, summary.facts.checkpoint)

    def _stage(self, uid: str, account: JobAccount) -> None:
        self._staged[uid] = account
        self._num_staged += 1

    def _known(self, uid: str) -> JobAccount | None:
        staged = self._staged.get(uid)
        return staged if staged is not None or self._recorded is None else self._recorded.jobs.get(uid)

    def _account(self, held: CachedObject) -> JobAccount:
        """What is known of a job, or a new account."""
        return self._known(held.key.uid) or self._opened(held)

    def _opened(self, held: CachedObject) -> JobAccount:
        labels, gpus = job_labels(self._cache, held)
        summary = held.summary
        has_profile = summary is not None and summary.is_started and self._cache.profile(summary.profile) is not None
        num_in_all = sum(map(len, self._labels.values()))
        in_use: Collection[JobLabels] = self._labels.get(labels.namespace, ())
        labels = bounded_labels(settled_labels(labels, has_profile=has_profile), in_use, num_in_all)
        self._labels.setdefault(labels.namespace, set()).add(labels)
        facts = summary.facts if summary is not None else None
        begun = facts.start if facts is not None and facts.start is not None else self._now()
        return JobAccount(labels=labels, gpus=gpus, at=begun.timestamp(), checkpoint=None)

    def _pods(self, uid: str) -> list[PodView]:
        return [held.pod for held in self._cache.pods_of(uid) if held.pod is not None]

    def _summary(self, uid: str) -> JobSummary | None:
        held = self._cache.job_of_uid(uid)
        return None if held is None else held.summary

    def _leavers(self, ledger: Ledger) -> bool:
        return any((summary := self._summary(uid)) is None or summary.is_finished for uid in ledger.jobs)

    async def _is_open(self, *, probes: bool = False) -> bool:
        """Whether what is on record is known. Reads it if not; while jobs continue uncounted only if it `probes`."""
        async with self._lock:
            return (probes or not self._is_uncounted) and await self._load()

    async def _load(self) -> bool:
        if self._is_current:
            return True
        try:
            found = await self._api.get(CONFIG_MAPS, self._namespace, self._name)
        except (ApiError, ApiUnreachableError) as error:
            self._continue_uncounted(error)
            return False
        read = Ledger() if found is None else _ledger_of(found)
        recorded = Ledger() if read is None else read
        # What is lost now, or was lost before.
        self._unreadable = (_content(found, KEY) if read is None else None) or _content(found, UNREADABLE)
        self._object, self._is_current = found, True
        attempt, self._attempt = self._attempt, None
        if attempt is not None and attempt.ledger == recorded:
            # The write whose answer was lost was carried out.
            self._written(attempt)
        else:
            self._recorded = recorded
        for labels in (*recorded.totals(), *(account.labels for account in recorded.jobs.values())):
            self._labels.setdefault(labels.namespace, set()).add(labels)
        return True

    async def _record(self, *, probes: bool = False) -> None:
        """Write everything that is staged; one write serves all who wait for it."""
        wanted = self._num_staged
        async with self._lock:
            if (self._is_uncounted and not probes) or not await self._load() or self._recorded is None:
                return
            if self._num_written >= wanted and not self._leavers(self._recorded):
                self._went_well()
                return
            attempt = self._following(self._recorded)
            self._attempt, self._is_current = attempt, False
            try:
                if attempt.staged or attempt.closed or self._object is None:
                    self._object = await self._write(attempt.ledger)
            except (ApiError, ApiUnreachableError) as error:
                self._continue_uncounted(error)
                return
            self._is_current, self._attempt = True, None
            self._written(attempt)
            self._went_well()

    def _written(self, attempt: _Attempt) -> None:
        self._recorded, self._num_written = attempt.ledger, attempt.number
        self._staged = {uid: account for uid, account in self._staged.items() if attempt.staged.get(uid) is not account}
        for uid, account in attempt.closed.items():
            result = account.ended.result if account.ended is not None else ""
            seconds = {outcome: round(spent, 1) for outcome, spent in account.gpu_seconds.items()}
            _log.info("accounted", uid=uid, **account.labels._asdict(), result=result, gpu_seconds=seconds)

    def _continue_uncounted(self, error: ApiError | ApiUnreachableError) -> None:
        """Jobs continue if the error will not pass soon. Raises it if it may."""
        now = self._now()
        self._failing_since = failing_since(self._failing_since, now)
        is_refusal = isinstance(error, ApiError) and error.is_refusal
        if not continues_uncounted(self._failing_since, now, is_refusal=is_refusal):
            raise error
        if not self._is_uncounted:
            _log.error("usage of jobs is not counted", config_map=f"{self._namespace}/{self._name}", error=str(error))
        self._is_uncounted = True

    def _went_well(self) -> None:
        """Everything that is known is on record."""
        if self._is_uncounted:
            _log.info("usage of jobs is counted again", config_map=f"{self._namespace}/{self._name}")
        self._failing_since, self._is_uncounted = None, False

    def _following(self, ledger: Ledger) -> _Attempt:
        """With what is staged, and with the accounts of jobs that ended or are gone added to the totals."""
        closed: dict[str, JobAccount] = {}
        totals, jobs = ledger.totals(), {**ledger.jobs, **self._staged}
        for uid, account in list(jobs.items()):
            summary = self._summary(uid)
            if summary is None or summary.is_finished:
                confirmed = GONE if summary is None else confirmed_by_summary(summary)
                closed[uid] = closed_account(account)
                totals[account.labels] = totals.get(account.labels, UsageTotals()).plus(closed[uid], confirmed)
                del jobs[uid]
        groups = tuple(_Group(labels=labels, totals=each) for labels, each in sorted(totals.items()))
        return _Attempt(Ledger(groups=groups, jobs=jobs), self._num_staged, dict(self._staged), closed)

    async def _write(self, ledger: Ledger) -> Document:
        content = ledger.model_dump_json(exclude_defaults=True).encode()
        data = {KEY: base64.b64encode(zlib.compress(content)).decode()}
        if self._unreadable is not None:
            data[UNREADABLE] = self._unreadable
        if self._object is not None:
            return await self._api.replace(CONFIG_MAPS, self._namespace, self._name, {**self._object, "binaryData": data})
        metadata = {"name": self._name, "namespace": self._namespace, "labels": {"finetune.dev/accounts": "true"}}
        body = {"apiVersion": CONFIG_MAPS.api_version, "kind": CONFIG_MAPS.name, "metadata": metadata, "binaryData": data}
        return await self._api.create(CONFIG_MAPS, self._namespace, body)


def accounts_name(release: str) -> str:
    """Name of the ConfigMap of a release, by that of its Lease."""
    return f"{release}-accounts"


def confirmed_by_summary(summary: JobSummary) -> Confirmed:
    """What a job's status says of pending things."""
    return Confirmed(
        summary.facts.has_result, {str(role): number for role, number in zip(Role, summary.facts.attempts, strict=True)}
    )

"""The ledger of usage: one ConfigMap of the release with the accounts of all jobs, and the totals of those that are gone.

It is one object, because only then adding to a total and removing a job's account are one write. It is written by one process,
whose writes may be carried out without an answer; docs/explanation/decisions/0022 has the reasons.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.kinds import CONFIG_MAPS
from finetune_operator.decide.account import Confirmed, JobAccount, closed_account
from finetune_operator.decide.uncounted import continues_uncounted, failing_since
from finetune_operator.decide.usage_labels import JobLabels, bounded_labels
from finetune_operator.decide.usage_totals import UsageTotals
from finetune_operator.logs import logger

_log = logger(__name__)
KEY, UNREADABLE = "accounts.json.z", "unreadable.json.z"
"""Keys of the content, and of a content that could not be read, which is kept for people."""
MOST_KEPT_CHARACTERS = 400_000
"""Longest unreadable content that is kept, so that there is room for what is counted: an object has a mebibyte."""
MOST_BYTES = 64 << 20
"""Largest content: a hundred times that of 5,000 running jobs. A longer one is truncated, and so unreadable."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True)
    labels: JobLabels
    totals: UsageTotals


class Ledger(BaseModel):
    """The recorded accounts and totals."""

    model_config = ConfigDict(frozen=True)
    groups: tuple[_Group, ...] = ()
    """Totals of jobs that have ended or are gone."""
    jobs: Mapping[str, JobAccount] = Field(default_factory=dict)
    """Accounts of the other jobs, by UID."""

    def totals(self) -> dict[JobLabels, UsageTotals]:
        """Return the totals by labels."""
        return {group.labels: group.totals for group in self.groups}


class _Write(NamedTuple):
    """A write of the ledger."""

    ledger: Ledger
    number: int
    """Number of the latest account that was staged for it."""
    staged: Mapping[str, JobAccount]
    closed: Mapping[str, JobAccount]
    """Accounts that it adds to the totals."""


def read_ledger(config_map: Document) -> Ledger:
    """Read the content of the ConfigMap. Raises ValueError."""
    try:
        content = zlib.decompressobj().decompress(base64.b64decode(config_map["binaryData"][KEY]), MOST_BYTES)
        return Ledger.model_validate_json(content)
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(str(error)) from error


def _ledger_of(config_map: Document) -> Ledger | None:
    """Read the content of the ConfigMap; None if that is not possible."""
    try:
        return read_ledger(config_map)
    except ValueError as error:
        kept = "" if _content(config_map, KEY) is None else UNREADABLE
        _log.error("usage is counted from zero: what was on record cannot be read", error=str(error)[:300], kept_as=kept)
        return None


def _content(config_map: Document | None, key: str) -> str | None:
    """The text at a key of the ConfigMap, which anybody may have edited; None if it cannot be ours."""
    data = (config_map or {}).get("binaryData")
    content = data.get(key) if isinstance(data, dict) else None
    return content if isinstance(content, str) and 0 < len(content) <= MOST_KEPT_CHARACTERS else None


class StoredLedger:
    """The ledger as the server has it, and what the next write adds. It is used from one event loop; any thread may read
    `recorded`.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        confirmed_at_end: Callable[[str], Confirmed | None],
        now: Callable[[], datetime],
    ) -> None:
        """confirmed_at_end: takes the UID of a job; returns what its status confirms if it has ended or is gone, else None."""
        self._api = api
        self._namespace = namespace
        self._name = name
        self._confirmed_at_end = confirmed_at_end
        self._now = now
        self._object: Document | None = None
        """The ConfigMap as the server has it."""
        self._unreadable: str | None = None
        """Earlier content that cannot be read."""
        self.recorded: Ledger | None = None
        """The ledger that is certainly on record."""
        self._is_current = False
        """Whether the server is known to have the same ledger."""
        self._unanswered: _Write | None = None
        """A write that got no answer."""
        self._staged: dict[str, JobAccount] = {}
        """Accounts that the next write puts on record."""
        self._num_staged = self._num_written = 0
        self._labels: dict[str, set[JobLabels]] = {}
        """Labels in use, by namespace."""
        self._lock = asyncio.Lock()
        self._failing_since: datetime | None = None
        self.is_uncounted = False
        """Whether jobs continue although nothing can be put on record. Then only calls that probe wait for an answer."""

    def known(self, uid: str) -> JobAccount | None:
        """The account of a job, as the next write leaves it."""
        staged = self._staged.get(uid)
        return staged if staged is not None or self.recorded is None else self.recorded.jobs.get(uid)

    def stage(self, uid: str, account: JobAccount) -> None:
        """Include an account in the next write."""
        self._staged[uid] = account
        self._num_staged += 1

    def use(self, labels: JobLabels) -> JobLabels:
        """Return the labels, or those of all others if there are too many, and mark them as in use."""
        in_use: Collection[JobLabels] = self._labels.get(labels.namespace, ())
        labels = bounded_labels(labels, in_use, sum(map(len, self._labels.values())))
        self._add(labels)
        return labels

    def _add(self, labels: JobLabels) -> None:
        self._labels.setdefault(labels.namespace, set()).add(labels)

    async def is_open(self, *, probes: bool = False) -> bool:
        """Whether the recorded ledger is known. Reads it if not; while jobs continue uncounted, only if `probes`."""
        async with self._lock:
            return (probes or not self.is_uncounted) and await self._load()

    async def record(self, *, probes: bool = False) -> None:
        """Write everything that is staged; one write serves all callers that wait for it."""
        wanted = self._num_staged
        async with self._lock:
            if (self.is_uncounted and not probes) or not await self._load() or self.recorded is None:
                return
            if self._num_written >= wanted and not self._has_ended_jobs(self.recorded):
                self._went_well()
                return
            write = self._following(self.recorded)
            self._unanswered, self._is_current = write, False
            try:
                if write.staged or write.closed or self._object is None:
                    self._object = await self._put(write.ledger)
            except (ApiError, ApiUnreachableError) as error:
                self._continue_uncounted(error)
                return
            self._is_current, self._unanswered = True, None
            self._written(write)
            self._went_well()

    async def _load(self) -> bool:
        if self._is_current:
            return True
        try:
            config_map = await self._api.get(CONFIG_MAPS, self._namespace, self._name)
        except (ApiError, ApiUnreachableError) as error:
            self._continue_uncounted(error)
            return False
        ledger = Ledger() if config_map is None else _ledger_of(config_map)
        recorded = Ledger() if ledger is None else ledger
        # Content that cannot be read now, or could not be read before.
        self._unreadable = (_content(config_map, KEY) if ledger is None else None) or _content(config_map, UNREADABLE)
        self._object, self._is_current = config_map, True
        write, self._unanswered = self._unanswered, None
        if write is not None and write.ledger == recorded:
            # The write whose answer was lost was carried out.
            self._written(write)
        else:
            self.recorded = recorded
        for labels in (*recorded.totals(), *(account.labels for account in recorded.jobs.values())):
            self._add(labels)
        return True

    def _following(self, ledger: Ledger) -> _Write:
        """Build the next write: it adds what is staged, and moves the accounts of jobs that ended or are gone to the totals."""
        closed: dict[str, JobAccount] = {}
        totals, jobs = ledger.totals(), {**ledger.jobs, **self._staged}
        for uid, account in list(jobs.items()):
            confirmed = self._confirmed_at_end(uid)
            if confirmed is not None:
                closed[uid] = closed_account(account)
                totals[account.labels] = totals.get(account.labels, UsageTotals()).plus(closed[uid], confirmed)
                del jobs[uid]
        groups = tuple(_Group(labels=labels, totals=usage) for labels, usage in sorted(totals.items()))
        return _Write(Ledger(groups=groups, jobs=jobs), self._num_staged, dict(self._staged), closed)

    def _has_ended_jobs(self, ledger: Ledger) -> bool:
        return any(self._confirmed_at_end(uid) is not None for uid in ledger.jobs)

    async def _put(self, ledger: Ledger) -> Document:
        content = ledger.model_dump_json(exclude_defaults=True).encode()
        data = {KEY: base64.b64encode(zlib.compress(content)).decode()}
        if self._unreadable is not None:
            data[UNREADABLE] = self._unreadable
        if self._object is not None:
            return await self._api.replace(CONFIG_MAPS, self._namespace, self._name, {**self._object, "binaryData": data})
        metadata = {"name": self._name, "namespace": self._namespace, "labels": {"finetune.dev/accounts": "true"}}
        body = {"apiVersion": CONFIG_MAPS.api_version, "kind": CONFIG_MAPS.name, "metadata": metadata, "binaryData": data}
        return await self._api.create(CONFIG_MAPS, self._namespace, body)

    def _written(self, write: _Write) -> None:
        self.recorded, self._num_written = write.ledger, write.number
        self._staged = {uid: account for uid, account in self._staged.items() if write.staged.get(uid) is not account}
        for uid, account in write.closed.items():
            result = account.ended.result if account.ended is not None else ""
            seconds = {outcome: round(spent, 1) for outcome, spent in account.gpu_seconds.items()}
            _log.info("accounted", uid=uid, **account.labels._asdict(), result=result, gpu_seconds=seconds)

    def _continue_uncounted(self, error: ApiError | ApiUnreachableError) -> None:
        """Let jobs continue uncounted if the error will not pass soon; raise it if it may."""
        now = self._now()
        self._failing_since = failing_since(self._failing_since, now)
        is_refusal = isinstance(error, ApiError) and error.is_refusal
        if not continues_uncounted(self._failing_since, now, is_refusal=is_refusal):
            raise error
        if not self.is_uncounted:
            _log.error("usage of jobs is not counted", config_map=f"{self._namespace}/{self._name}", error=str(error))
        self.is_uncounted = True

    def _went_well(self) -> None:
        """Note that everything known is on record."""
        if self.is_uncounted:
            _log.info("usage of jobs is counted again", config_map=f"{self._namespace}/{self._name}")
        self._failing_since, self.is_uncounted = None, False


def accounts_name(release: str) -> str:
    """Name of the ConfigMap of a release. `release`: the name of its Lease."""
    return f"{release}-accounts"

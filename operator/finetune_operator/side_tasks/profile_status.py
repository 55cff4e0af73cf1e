"""Writes into the status of each FineTuneProfile whether jobs can use it.

Each generation of a profile is judged only once in the lifetime of this process, so that two releases that judge differently do
not overwrite each other's status forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from pydantic import ValidationError

from finetune_job.api.status import Condition, FineTuneProfileStatus
from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import CachedObject, utc_now
from finetune_operator.cache.reader import Reader
from finetune_operator.client.answers import ApiError
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import PROFILES
from finetune_operator.decide.profile_verdict import profile_status
from finetune_operator.decide.seen.times import timestamp
from finetune_operator.logs import logger

_log = logger(__name__)


class ProfileStatus:
    """Judges profiles when they appear or change."""

    def __init__(self, api: Api, cache: Cache, *, now: Callable[[], datetime] = utc_now) -> None:
        self._api = api
        self._cache = cache
        self._now = now
        self._reader = Reader()
        self._judged: dict[str, int] = {}
        """UID of a profile -> the latest generation that was judged."""
        self.changed = asyncio.Event()
        """Set by the caller when a profile was created or changed."""

    async def run(self) -> None:
        """Judge profiles until cancelled. Raises ApiUnreachableError; the next call continues with the remaining profiles."""
        while True:
            self.changed.clear()
            profiles = self._cache.profiles()
            for uid in self._judged.keys() - {cached.key.uid for cached in profiles}:
                del self._judged[uid]
            for cached in profiles:
                await self._judge(cached)
            await self.changed.wait()

    async def _judge(self, cached: CachedObject) -> None:
        document = cached.document()
        generation = document["metadata"].get("generation")
        if not isinstance(generation, int) or self._judged.get(cached.key.uid) == generation:
            return
        try:
            written = FineTuneProfileStatus.model_validate(document.get("status") or {})
        except ValidationError:
            written = FineTuneProfileStatus(conditions=list[Condition]())
        status = profile_status(
            self._reader.profile(cached), written.conditions, generation=generation, now=timestamp(self._now())
        )
        if status != written:
            # The UID is a precondition, because the name may belong to another object by now.
            patch = {"metadata": {"uid": cached.key.uid}, "status": status.model_dump(mode="json", by_alias=True)}
            try:
                await self._api.patch(PROFILES, "", cached.key.name, patch, subresource="status")
            except ApiError as error:
                if error.is_conflict:
                    return
                # If permission is missing, or the CRD has no status subresource, the status of jobs still shows what is wrong.
                _log.warning("profile status not written", profile=cached.key.name, error=str(error))
        self._judged[cached.key.uid] = generation

"""Reports failing passes to users, with one small write that needs nothing of what a pass reads or decides."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import job_phase
from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.api import Api
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.cluster.kinds import JOBS
from finetune_operator.cluster.projection import utc_now
from finetune_operator.decide.operator_error import with_operator_error
from finetune_operator.decide.times import timestamp

LONGEST_WORDS = 600
_SECRETS = re.compile(r"(?<=://)[^/@\s]+@|(?i:\bbearer\s+)\S+|\beyJ[\w-]+\.[\w.-]+")
"""User names and passwords of addresses, and tokens."""


class FailedPasses:
    """Writes the condition."""

    def __init__(self, api: Api, cache: Cache, now: Callable[[], datetime] = utc_now) -> None:
        self._api = api
        self._cache = cache
        self._now = now

    async def tell(self, key: JobKey, error: Exception) -> None:
        """Report in the job's status that passes fail, unless it is reported already. Raises ApiError, ApiUnreachableError."""
        cached = self._cache.job(key)
        if cached is None:
            return
        document = cached.document()
        status, metadata = document.get("status") or {}, document["metadata"]
        if "deletionTimestamp" in metadata:
            return
        patch = with_operator_error(status, metadata.get("generation") or 0, timestamp(self._now()), words_of(error))
        if patch is None:
            return
        if "phase" not in status:
            patch["phase"] = str(job_phase(FineTuneJobStatus.model_validate(patch).conditions))
        body = {"metadata": {"resourceVersion": str(cached.key.version), "uid": cached.key.uid}, "status": patch}
        self._cache.take(JOBS, await self._api.patch(JOBS, key.namespace, key.name, body, subresource="status"))


def words_of(error: Exception) -> str:
    """Describe an error for users: a server's message without secrets, and of a defect only its type."""
    match error:
        case ApiError():
            message = _SECRETS.sub("***", " ".join(str(error).split()))
            return message if len(message) <= LONGEST_WORDS else f"{message[: LONGEST_WORDS - 3]}..."
        case ApiUnreachableError():
            return "the API server gives no answer to one of its requests."
        case _:
            return f"an unexpected {type(error).__name__}; its log has more."

"""Background tasks beside the workers. They survive failures: a server that is away comes back, and a defect ends only one
round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from finetune_operator.cluster.answers import ApiError, ApiUnreachableError
from finetune_operator.cluster.cache import JobKey
from finetune_operator.logs import logger
from finetune_operator.workqueue import WorkQueue

_log = logger(__name__)
PAUSE_SECONDS = 5.0
CountFailure = Callable[[str], None]
"""Called with the name of what failed."""


async def keep_trying(
    name: str,
    work: Callable[[], Awaitable[object]],
    failed: CountFailure,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Do the work; begin it again after a pause each time that it fails."""
    while True:
        try:
            await work()
            return
        except (ApiError, ApiUnreachableError) as error:
            _log.warning("failed: begun again after a pause", task=name, error=str(error))
        except Exception:  # noqa: BLE001 - no defect of one task may end the work on all jobs
            _log.exception("failed unexpectedly: begun again after a pause", task=name)
        failed(name)
        await sleep(PAUSE_SECONDS)


@dataclass(frozen=True)
class Relisting:
    """Compares the cache with the API server now and then, and looks at every job once in between."""

    compare: Callable[[], Awaitable[Iterable[JobKey]]]
    """Returns the jobs that a difference concerns."""
    job_keys: Callable[[], list[JobKey]]
    queue: WorkQueue[JobKey]
    first: float
    """Seconds until the first comparison, for objects that vanished between the start-up list and the first watch."""
    period: float
    restarted: asyncio.Event
    """Set when the watches were started again: then the cache is compared at once, and soon after that."""
    failed: CountFailure

    async def run(self) -> None:
        """Compare until cancelled."""
        pause = self.first
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.restarted.wait()
            pause = self.first if self.restarted.is_set() else self.period
            self.restarted.clear()
            try:
                for key in sorted(await self.compare()):
                    self.queue.add(key)
            except (ApiError, ApiUnreachableError) as error:
                _log.warning("relist failed", error=str(error))
                self.failed("relist")
            except Exception:  # noqa: BLE001
                # The next comparison finds what this one would have found; the work on all jobs must not end for it.
                _log.exception("relist failed unexpectedly")
                self.failed("relist")
            # Spread over the pause: every job is looked at once in a while even if each event about it was lost.
            keys = self.job_keys()
            for place, key in enumerate(keys):
                self.queue.add_after(key, pause * (place + 1) / (len(keys) + 1))

"""Tasks that run alongside the workers. No failure ends them: they are retried after a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from finetune_operator.client.answers import ApiError, ApiUnreachableError
from finetune_operator.client.kinds import JobKey
from finetune_operator.logs import logger
from finetune_operator.queue.workqueue import WorkQueue

_log = logger(__name__)
PAUSE_SECONDS = 5.0


async def keep_trying(
    name: str,
    work: Callable[[], Awaitable[object]],
    failed: Callable[[str], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Do the work. Whenever it fails, call `failed` with the task's name, and start over after a pause."""
    while True:
        try:
            await work()
            return
        except (ApiError, ApiUnreachableError) as error:
            _log.warning("task failed and starts again after a pause", task=name, error=str(error))
        except Exception:  # noqa: BLE001 - a defect of one task must not end the work on all jobs
            _log.exception("task failed unexpectedly and starts again after a pause", task=name)
        failed(name)
        await sleep(PAUSE_SECONDS)


@dataclass(frozen=True)
class Relisting:
    """Compares the cache with the API server from time to time, and queues every job once between two comparisons."""

    compare: Callable[[], Awaitable[Iterable[JobKey]]]
    """Compares once, and returns the jobs that are affected by differences."""
    job_keys: Callable[[], list[JobKey]]
    queue: WorkQueue[JobKey]
    first: float
    """Seconds until the first comparison, for objects that vanished between the start-up list and the first watch."""
    period: float
    restarted: asyncio.Event
    """Set when the watches were restarted. The cache is then compared at once, and once more soon after."""
    failed: Callable[[str], None]
    """Called with "relist" when a comparison fails."""

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
            except Exception:  # noqa: BLE001 - the next comparison finds the same differences
                _log.exception("relist failed unexpectedly")
                self.failed("relist")
            # Spread the jobs over the pause, so that each has a pass once in a while even if all events about it were lost.
            keys = self.job_keys()
            for place, key in enumerate(keys):
                self.queue.add_after(key, pause * (place + 1) / (len(keys) + 1))

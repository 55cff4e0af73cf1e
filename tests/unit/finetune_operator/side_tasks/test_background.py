"""Whatever fails next to the workers is logged, counted and begun again."""

import asyncio
from collections.abc import Iterable

import pytest

from finetune_operator.client.answers import ApiError, ApiUnreachableError, NotLeadingError
from finetune_operator.client.kinds import JobKey
from finetune_operator.queue.workqueue import WorkQueue
from finetune_operator.side_tasks.background import PAUSE_SECONDS, Relisting, keep_trying
from tests.unit.finetune_operator.fakes import Clock

KEY = JobKey("team", "tune")
ERRORS = [
    ApiError("LIST", 500, "", ""),
    ApiUnreachableError("away"),
    NotLeadingError("lost"),
    TypeError("items: null"),
    TimeoutError(),
]


@pytest.mark.parametrize("error", ERRORS)
def test_work_that_fails_is_begun_again_after_a_pause(error: Exception) -> None:
    clock, ends, failures = Clock(), [error, error, None], []

    async def work() -> None:
        end = ends.pop(0)
        if end is not None:
            raise end

    asyncio.run(keep_trying("it", work, failures.append, clock.sleep))
    assert (ends, failures, clock.now) == ([], ["it", "it"], 1000 + 2 * PAUSE_SECONDS)


async def test_cancelled_work_stays_cancelled() -> None:
    task = asyncio.create_task(keep_trying("it", asyncio.Event().wait, lambda _: pytest.fail("no failure")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Server:
    """What each comparison returns or raises."""

    def __init__(self, *ends: list[JobKey] | Exception) -> None:
        self.ends = list(ends)
        self.compared = asyncio.Semaphore(0)

    async def compare(self) -> Iterable[JobKey]:
        self.compared.release()
        end = self.ends.pop(0) if self.ends else []
        if isinstance(end, Exception):
            raise end
        return end


def relisting(server: Server, queue: WorkQueue[JobKey], **changes: object) -> Relisting:
    settings = {"first": 0.001, "period": 0.001, "restarted": asyncio.Event(), "failed": pytest.fail} | changes
    return Relisting(server.compare, lambda: [KEY], queue, **settings)  # type: ignore[arg-type]


async def test_relist_is_repeated_and_every_job_is_looked_at_in_between() -> None:
    server = Server([], [KEY])
    queue: WorkQueue[JobKey] = WorkQueue(retry_first=0.5, retry_longest=60.0)
    task = asyncio.create_task(relisting(server, queue).run())
    async with asyncio.timeout(60):
        for _ in range(3):
            await server.compared.acquire()
        assert await queue.get() == KEY
    task.cancel()


@pytest.mark.parametrize("error", ERRORS)
async def test_a_relist_that_fails_is_counted_and_the_next_one_comes_after_the_usual_pause(error: Exception) -> None:
    server, failures = Server(error, error, [KEY]), []
    queue: WorkQueue[JobKey] = WorkQueue(retry_first=0.5, retry_longest=60.0)
    task = asyncio.create_task(relisting(server, queue, failed=failures.append).run())
    async with asyncio.timeout(60):
        for _ in range(4):
            await server.compared.acquire()
        assert await queue.get() == KEY
    assert failures == ["relist", "relist"]
    assert not task.done()
    task.cancel()


async def test_watches_that_were_started_again_are_followed_by_a_relist_at_once() -> None:
    server, restarted = Server(), asyncio.Event()
    queue: WorkQueue[JobKey] = WorkQueue(retry_first=0.5, retry_longest=60.0)
    task = asyncio.create_task(relisting(server, queue, first=3600.0, period=3600.0, restarted=restarted).run())
    await asyncio.sleep(0)
    assert server.compared.locked()
    restarted.set()
    async with asyncio.timeout(60):
        await server.compared.acquire()
    assert not restarted.is_set()
    task.cancel()

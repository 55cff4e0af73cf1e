"""A replica leads while it holds the lease, and ends when it loses it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from finetune_operator.client.answers import ApiUnreachableError, NotLeadingError
from finetune_operator.leader.leadership import LeadershipThread
from finetune_operator.leader.lease import Elector, LeaseTiming
from tests.unit.finetune_operator.fakes import FakeLeases

QUICK = LeaseTiming(15, 10, 0.01)
DEADLINE = 60


class Replica:
    """An elector of a lease, and whether its connections were closed."""

    def __init__(self, lease: FakeLeases, identity: str = "me") -> None:
        self.lease, self.identity, self.is_closed = lease, identity, False

    @asynccontextmanager
    async def elector(self) -> AsyncIterator[Elector]:
        try:
            yield Elector(self.lease, self.identity, QUICK)
        finally:
            self.is_closed = True


async def test_thread_leads_and_gives_the_lease_back_on_stop() -> None:
    replica = Replica(FakeLeases())
    thread = LeadershipThread(replica.elector, on_lost=lambda: pytest.fail("lost"))
    with pytest.raises(NotLeadingError):
        thread.fence()
    thread.start()
    async with asyncio.timeout(DEADLINE):
        await thread.held.wait()
    thread.fence()
    assert (replica.lease.holder, replica.is_closed) == ("me", False)
    await thread.stop()
    assert (replica.lease.holder, replica.is_closed) == ("", True)
    with pytest.raises(NotLeadingError):
        thread.fence()


async def test_standby_that_ends_leaves_the_lease_of_the_leader_alone() -> None:
    lease = FakeLeases()
    leader = LeadershipThread(Replica(lease, "first").elector, on_lost=lambda: pytest.fail("lost"))
    leader.start()
    async with asyncio.timeout(DEADLINE):
        await leader.held.wait()
    standby = LeadershipThread(Replica(lease, "second").elector, on_lost=lambda: pytest.fail("lost"))
    standby.start()
    await standby.stop()
    assert (lease.holder, standby.held.is_set()) == ("first", False)
    await leader.stop()


@asynccontextmanager
async def without_credentials() -> AsyncIterator[Elector]:
    raise RuntimeError("no credentials")
    yield


@asynccontextmanager
async def away() -> AsyncIterator[Elector]:
    raise ApiUnreachableError("away")
    yield


@pytest.mark.parametrize("elector", [without_credentials, away])
async def test_thread_that_fails_ends_the_replica(elector: Callable[[], AbstractAsyncContextManager[Elector]]) -> None:
    lost = threading.Event()
    LeadershipThread(elector, on_lost=lost.set).start()
    assert await asyncio.to_thread(lost.wait, DEADLINE)


async def test_thread_whose_lease_is_taken_says_so_and_does_not_give_it_back() -> None:
    lease, lost = FakeLeases(), threading.Event()
    thread = LeadershipThread(Replica(lease).elector, on_lost=lost.set)
    thread.start()
    async with asyncio.timeout(DEADLINE):
        await thread.held.wait()
    lease._store(lease.lease | {"spec": lease.lease["spec"] | {"holderIdentity": "other"}})
    assert await asyncio.to_thread(lost.wait, DEADLINE)
    await thread.stop()
    assert lease.holder == "other"


async def test_thread_that_is_stopped_before_it_has_begun_competes_for_nothing() -> None:
    lease = FakeLeases()
    thread = LeadershipThread(Replica(lease).elector, on_lost=lambda: pytest.fail("lost"))
    await thread.stop()
    thread.start()
    await asyncio.to_thread(thread._thread.join, DEADLINE)
    assert not thread._thread.is_alive()
    assert lease.lease is None

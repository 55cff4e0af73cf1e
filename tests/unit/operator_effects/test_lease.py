import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from finetune_operator.cluster.lease import Elector, LeaseThread, LeaseTiming
from tests.unit.operator_effects.fakes import Clock, FakeLeases

TIMING = LeaseTiming(duration=15, renew_deadline=10, retry=2)


def elector(leases: FakeLeases, identity: str, clock: Clock) -> Elector:
    return Elector(leases, identity, TIMING, clock=clock, sleep=clock.sleep)


def test_first_comer_takes_the_lease_and_release_gives_it_back() -> None:
    leases, clock = FakeLeases(), Clock()
    one = elector(leases, "one", clock)
    asyncio.run(one.acquire())
    assert leases.holder == "one"
    asyncio.run(one.release())
    assert leases.holder == ""
    started = clock.now
    asyncio.run(elector(leases, "two", clock).acquire())
    assert (leases.holder, clock.now) == ("two", started)


def test_standby_waits_until_the_record_has_not_changed_for_its_duration() -> None:
    leases, clock = FakeLeases(), Clock()
    asyncio.run(elector(leases, "dead", clock).acquire())
    started = clock.now
    asyncio.run(elector(leases, "standby", clock).acquire())
    assert leases.holder == "standby"
    assert 15 <= clock.now - started <= 15 + 2 * TIMING.retry
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseTransitions"] == 1


def test_standby_never_takes_a_lease_that_is_renewed() -> None:
    leases, clock = FakeLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    rounds = 0

    async def sleep(seconds: float) -> None:
        nonlocal rounds
        clock.now += seconds
        rounds += 1
        if rounds > 50:
            raise asyncio.CancelledError
        await holder._try_to_take()

    standby = Elector(leases, "standby", TIMING, clock=clock, sleep=sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(standby.acquire())
    assert leases.holder == "holder"


def test_own_identity_takes_over_at_once_after_a_crash() -> None:
    leases, clock = FakeLeases(), Clock()
    asyncio.run(elector(leases, "pod-0", clock).acquire())
    started = clock.now
    asyncio.run(elector(leases, "pod-0", clock).acquire())
    assert clock.now == started


def test_holder_gives_up_before_others_may_believe_the_lease_expired() -> None:
    leases, clock = FakeLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    started = clock.now
    leases.unreachable = True
    asyncio.run(holder.hold())
    assert TIMING.renew_deadline <= clock.now - started < TIMING.duration


def test_holder_notices_that_another_has_taken_over() -> None:
    leases, clock = FakeLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    assert leases.lease is not None
    leases.lease["spec"]["holderIdentity"] = "other"
    started = clock.now
    asyncio.run(holder.hold())
    assert clock.now - started <= 2 * TIMING.retry
    assert leases.holder == "other"


def test_holder_survives_a_short_outage() -> None:
    leases, clock = FakeLeases(), Clock()
    rounds = 0

    async def sleep(seconds: float) -> None:
        nonlocal rounds
        rounds += 1
        clock.now += seconds
        leases.unreachable = rounds in (2, 3)
        if rounds > 10:
            raise asyncio.CancelledError

    holder = Elector(leases, "holder", TIMING, clock=clock, sleep=sleep)
    asyncio.run(holder.acquire())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(holder.hold())
    assert leases.holder == "holder"


def test_thread_tells_the_main_loop_and_releases_on_stop() -> None:
    leases = FakeLeases()

    async def make() -> tuple[Elector, Callable[[], Awaitable[None]]]:
        async def close() -> None:
            pass

        return Elector(leases, "me", LeaseTiming(15, 10, 0.01)), close

    async def scenario() -> None:
        lease = LeaseThread(make, on_lost=lambda: pytest.fail("lost"))
        lease.start()
        async with asyncio.timeout(60):
            await lease.held.wait()
        assert leases.holder == "me"
        await lease.stop()
        assert leases.holder == ""

    asyncio.run(scenario())


def test_thread_that_fails_ends_the_replica() -> None:
    lost = threading.Event()

    async def make() -> tuple[Elector, Callable[[], Awaitable[None]]]:
        raise RuntimeError("no credentials")

    async def scenario() -> None:
        lease = LeaseThread(make, on_lost=lost.set)
        lease.start()
        assert await asyncio.to_thread(lost.wait, 60)

    asyncio.run(scenario())

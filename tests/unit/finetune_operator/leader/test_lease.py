import asyncio
from collections.abc import Awaitable, Callable

import pytest

from finetune_operator.client.answers import ApiError, ApiUnreachableError, NotLeadingError
from finetune_operator.leader.lease import Elector, LeaseTiming
from tests.unit.finetune_operator.fakes import Clock, Document, FakeLeases

TIMING = LeaseTiming(duration=15, renew_deadline=10, retry=2)


class EventfulLeases(FakeLeases):
    """A lease of which a test says what happens before and after a write reaches the server, and that counts the writes."""

    def __init__(self) -> None:
        super().__init__()
        self.before_write: list[Callable[[], None]] = []
        self.after_write: list[Callable[[], None]] = []
        self.writes = 0

    async def create(self, spec: Document) -> Document:
        self._next(self.before_write)
        stored = await super().create(spec)
        self._next(self.after_write)
        return stored

    async def replace(self, lease: Document) -> Document:
        self._next(self.before_write)
        stored = await super().replace(lease)
        self._next(self.after_write)
        return stored

    def take(self, identity: str) -> None:
        """Somebody writes the lease."""
        spec = {"holderIdentity": identity, "leaseDurationSeconds": 15, "renewTime": f"by {identity}"}
        self._store({"metadata": {}, "spec": spec})

    def _next(self, steps: list[Callable[[], None]]) -> None:
        self.writes += steps is self.before_write
        if steps:
            steps.pop(0)()


class GaveUpError(Exception):
    """A test's sleep has lasted long enough."""


def sleeping(clock: Clock, longest: float) -> Callable[[float], Awaitable[None]]:
    """A sleep that ends the test once the clock has passed `longest` seconds."""
    end = clock.now + longest

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now >= end:
            raise GaveUpError

    return sleep


def elector(leases: FakeLeases, identity: str, clock: Clock) -> Elector:
    # No test waits for an hour: one that does waits for what will not come.
    return Elector(leases, identity, TIMING, clock=clock, sleep=sleeping(clock, 3600))


def held() -> tuple[EventfulLeases, Clock, Elector]:
    """A lease, and the elector that has taken it by this clock."""
    leases, clock = EventfulLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    return leases, clock, holder


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
    assert leases.lease["spec"]["leaseTransitions"] == 1


def test_standby_never_takes_a_lease_that_is_renewed() -> None:
    leases, clock, holder = held()
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


def test_holder_notices_that_another_has_taken_over() -> None:
    leases, clock, holder = held()
    leases._store(leases.lease | {"spec": leases.lease["spec"] | {"holderIdentity": "other"}})
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


@pytest.mark.parametrize("is_new", [True, False], ids=["a new lease", "a lease that was given back"])
def test_lost_race_for_a_lease_is_not_believed_won(is_new: bool) -> None:
    leases, clock = EventfulLeases(), Clock()
    if not is_new:
        leases.take("")
    leases.before_write.append(lambda: leases.take("faster"))
    late = Elector(leases, "late", TIMING, clock=clock, sleep=sleeping(clock, 10))
    with pytest.raises(GaveUpError):
        asyncio.run(late.acquire())
    assert leases.holder == "faster"
    with pytest.raises(NotLeadingError):
        late.fence()


def test_holder_that_loses_the_race_for_its_own_expired_lease_gives_up() -> None:
    leases, clock, holder = held()
    leases.before_write.append(lambda: leases.take("other"))
    asyncio.run(holder.hold())
    assert leases.holder == "other"
    assert clock.now == 1000 + TIMING.retry


def test_holder_whose_write_came_through_without_an_answer_continues() -> None:
    leases, clock = EventfulLeases(), Clock()
    holder = Elector(leases, "holder", TIMING, clock=clock, sleep=sleeping(clock, 30))
    asyncio.run(holder.acquire())
    leases.before_write.append(lambda: leases.take("holder"))
    with pytest.raises(GaveUpError):
        asyncio.run(holder.hold())
    assert leases.holder == "holder"


def test_age_counts_from_before_the_write_and_not_from_its_answer() -> None:
    leases, clock = EventfulLeases(), Clock()
    holder = Elector(leases, "holder", TIMING, clock=clock, sleep=sleeping(clock, 12))
    leases.after_write.append(lambda: clock.advance(4))
    asyncio.run(holder.acquire())
    assert holder.age == 4
    leases.after_write.append(lambda: clock.advance(7))
    with pytest.raises(GaveUpError):
        asyncio.run(holder.hold())
    # 7 s for the answer and 2 s of sleep; the first sleep was before the write.
    assert holder.age == 9


def test_lease_whose_answer_took_too_long_is_not_believed_ours() -> None:
    """The write was carried out, and when its answer came others were about to take the lease."""
    leases, clock = EventfulLeases(), Clock()
    slow = elector(leases, "slow", clock)
    leases.after_write.append(lambda: clock.advance(TIMING.renew_deadline))
    asyncio.run(slow.acquire())
    assert leases.writes == 2
    assert slow.age == 0


async def test_call_that_never_ends_does_not_keep_a_standby_from_trying_again() -> None:
    class HangingOnce(FakeLeases):
        calls = 0

        async def read(self) -> Document | None:
            self.calls += 1
            if self.calls == 1:
                await asyncio.Event().wait()
            return await super().read()

    leases = HangingOnce()
    async with asyncio.timeout(30):
        await Elector(leases, "standby", LeaseTiming(duration=15, renew_deadline=0.3, retry=0.05)).acquire()
    assert leases.holder == "standby"


def test_release_of_a_lease_that_another_holds_leaves_it_alone() -> None:
    leases, _, holder = held()
    leases.take("other")
    asyncio.run(holder.release())
    assert leases.holder == "other"
    assert leases.writes == 1


def test_release_after_a_renewal_whose_answer_was_never_seen_still_gives_the_lease_back() -> None:
    leases, _, holder = held()
    leases.take("holder")
    asyncio.run(holder.release())
    assert leases.holder == ""


def test_release_that_fails_or_loses_a_race_ends_without_an_error() -> None:
    leases, _, holder = held()
    leases.before_write.append(lambda: leases.take("other"))
    asyncio.run(holder.release())
    assert leases.holder == "other"
    leases.unreachable = True
    asyncio.run(holder.release())


def test_fence_is_closed_before_the_lease_is_ours_and_from_the_deadline_on_and_after_a_release() -> None:
    leases, clock = FakeLeases(), Clock()
    holder = elector(leases, "holder", clock)
    with pytest.raises(NotLeadingError):
        holder.fence()
    asyncio.run(holder.acquire())
    clock.advance(9.9)
    holder.fence()
    clock.advance(0.1)
    with pytest.raises(NotLeadingError, match=r"10\.0 s ago"):
        holder.fence()
    asyncio.run(holder.acquire())
    holder.fence()
    asyncio.run(holder.release())
    with pytest.raises(NotLeadingError):
        holder.fence()


def test_renewal_is_one_request_and_survives_the_lease_being_deleted() -> None:
    class Counting(FakeLeases):
        reads = 0

        async def read(self) -> Document | None:
            self.reads += 1
            return await super().read()

        async def replace(self, lease: Document) -> Document:
            if self.lease is None:
                raise ApiError("replace", 404, "NotFound", "deleted")
            return await super().replace(lease)

    leases, clock = Counting(), Clock()
    holder = Elector(leases, "holder", TIMING, clock=clock, sleep=sleeping(clock, 20))
    asyncio.run(holder.acquire())
    with pytest.raises(GaveUpError):
        asyncio.run(holder.hold())
    assert leases.reads == 1
    leases.lease = None
    holder._sleep = sleeping(clock, 5)
    with pytest.raises(GaveUpError):
        asyncio.run(holder.hold())
    assert leases.holder == "holder"


@pytest.mark.parametrize(
    "error", [ApiError("any", 403, "Refused", ""), ApiError("any", 500, "", ""), ApiUnreachableError("away")]
)
def test_server_that_is_away_closes_the_fence_before_the_lease_expires_and_ends_nothing(error: Exception) -> None:
    class Failing(FakeLeases):
        left = 3

        async def read(self) -> Document | None:
            self.fail()
            return await super().read()

        async def replace(self, lease: Document) -> Document:
            self.fail()
            return await super().replace(lease)

        def fail(self) -> None:
            if self.left:
                self.left -= 1
                raise error

    leases, clock = Failing(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    assert (leases.holder, clock.now) == ("holder", 1000 + 3 * TIMING.retry)
    leases.left = 1000
    holder._sleep = sleeping(clock, 60)
    with pytest.raises(GaveUpError):
        asyncio.run(holder.hold())
    with pytest.raises(NotLeadingError, match=r"60\.0 s ago"):
        holder.fence()
    leases.left = 0
    holder._sleep = sleeping(clock, 4)
    with pytest.raises(GaveUpError):
        asyncio.run(holder.hold())
    holder.fence()


@pytest.mark.parametrize("holder_now", ["", "other"])
def test_holder_whose_lease_another_has_had_meanwhile_ends(holder_now: str) -> None:
    """Given back or not: the one that had it may have written, and what this replica knows is of before."""
    leases, _, holder = held()
    leases.take(holder_now)
    asyncio.run(holder.hold())
    assert leases.holder == holder_now
    assert leases.writes == 2


async def test_call_that_never_ends_closes_the_fence_and_is_given_up() -> None:
    class Hanging(FakeLeases):
        hangs = False

        async def read(self) -> Document | None:
            tried.release()
            if self.hangs:
                await asyncio.Event().wait()
            return await super().read()

    tried = asyncio.Semaphore(0)
    leases = Hanging()
    holder = Elector(leases, "holder", LeaseTiming(duration=15, renew_deadline=0.2, retry=0.01))
    await holder.acquire()
    leases.hangs = True
    leases._store({"metadata": {}, "spec": {"holderIdentity": "holder"}})
    task = asyncio.create_task(holder.hold())
    async with asyncio.timeout(60):
        for _ in range(4):
            await tried.acquire()
        with pytest.raises(NotLeadingError):
            holder.fence()
        assert not task.done()
        await holder.release()
    task.cancel()

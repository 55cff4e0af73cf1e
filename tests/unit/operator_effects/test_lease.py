import asyncio
from collections.abc import Awaitable, Callable

import pytest

from finetune_operator.cluster.errors import ApiError, NotLeadingError
from finetune_operator.cluster.lease import Elector, LeaseTiming
from tests.unit.operator_effects.fakes import Clock, Document, FakeLeases

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


def test_lost_race_for_a_new_lease_is_not_believed_won() -> None:
    leases, clock = EventfulLeases(), Clock()
    leases.before_write.append(lambda: leases.take("faster"))
    late = Elector(leases, "late", TIMING, clock=clock, sleep=sleeping(clock, 10))
    with pytest.raises(GaveUpError):
        asyncio.run(late.acquire())
    assert leases.holder == "faster"
    with pytest.raises(NotLeadingError):
        late.fence()


def test_lost_race_for_a_lease_that_was_given_back_is_not_believed_won() -> None:
    leases, clock = EventfulLeases(), Clock()
    leases.take("")
    leases.before_write.append(lambda: leases.take("faster"))
    late = Elector(leases, "late", TIMING, clock=clock, sleep=sleeping(clock, 10))
    with pytest.raises(GaveUpError):
        asyncio.run(late.acquire())
    assert leases.holder == "faster"
    with pytest.raises(NotLeadingError):
        late.fence()


def test_holder_that_loses_the_race_for_its_own_expired_lease_gives_up() -> None:
    leases, clock = EventfulLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    leases.before_write.append(lambda: leases.take("other"))
    asyncio.run(holder.hold())
    assert leases.holder == "other"
    assert clock.now == 1000 + TIMING.retry


def test_holder_whose_write_came_through_without_an_answer_goes_on() -> None:
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


def test_renewals_whose_answers_take_long_end_the_hold_before_the_lease_expires() -> None:
    leases, clock = EventfulLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    leases.after_write.append(lambda: clock.advance(9))
    asyncio.run(holder.hold())
    # Renewed at 1002, answered at 1011; at 1013 that is 11 s ago, and a renewal from here might come after another's.
    assert (clock.now, leases.writes) == (1013, 2)


def test_call_that_never_ends_does_not_keep_the_holder() -> None:
    class Hanging(FakeLeases):
        hangs = False

        async def replace(self, lease: Document) -> Document:
            if self.hangs:
                await asyncio.Event().wait()
            return await super().replace(lease)

    async def scenario() -> None:
        leases = Hanging()
        holder = Elector(leases, "holder", LeaseTiming(duration=15, renew_deadline=0.3, retry=0.05))
        await holder.acquire()
        leases.hangs = True
        async with asyncio.timeout(30):
            await holder.hold()
            await holder.release()
        assert holder.age > 0.3

    asyncio.run(scenario())


def test_call_that_never_ends_does_not_keep_a_standby_from_trying_again() -> None:
    class HangingOnce(FakeLeases):
        calls = 0

        async def read(self) -> Document | None:
            self.calls += 1
            if self.calls == 1:
                await asyncio.Event().wait()
            return await super().read()

    async def scenario() -> None:
        leases = HangingOnce()
        async with asyncio.timeout(30):
            await Elector(leases, "standby", LeaseTiming(duration=15, renew_deadline=0.3, retry=0.05)).acquire()
        assert leases.holder == "standby"

    asyncio.run(scenario())


@pytest.mark.parametrize("code", [403, 422, 500])
def test_refusals_are_waited_out_by_a_standby_and_end_a_holder_in_time(code: int) -> None:
    class Refusing(FakeLeases):
        left = 3

        async def read(self) -> Document | None:
            self.refuse()
            return await super().read()

        async def replace(self, lease: Document) -> Document:
            self.refuse()
            return await super().replace(lease)

        def refuse(self) -> None:
            if self.left:
                self.left -= 1
                raise ApiError("any", code, "Refused", "because")

    leases, clock = Refusing(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    assert (leases.holder, clock.now) == ("holder", 1000 + 3 * TIMING.retry)
    leases.left = 1000
    asyncio.run(holder.hold())
    assert clock.now == 1000 + 3 * TIMING.retry + TIMING.renew_deadline


def test_release_of_a_lease_that_another_holds_leaves_it_alone() -> None:
    leases, clock = EventfulLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    leases.take("other")
    asyncio.run(holder.release())
    assert leases.holder == "other"
    assert leases.writes == 1


def test_release_after_a_renewal_whose_answer_was_never_seen_still_gives_the_lease_back() -> None:
    leases, clock = EventfulLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
    leases.take("holder")
    asyncio.run(holder.release())
    assert leases.holder == ""


def test_release_that_fails_or_loses_a_race_ends_without_an_error() -> None:
    leases, clock = EventfulLeases(), Clock()
    holder = elector(leases, "holder", clock)
    asyncio.run(holder.acquire())
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

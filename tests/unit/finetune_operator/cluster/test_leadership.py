"""Two releases never serve the same namespace, and a replica that loses lease or claim ends."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from finetune_operator.cluster.answers import ApiError, ApiUnreachableError, NotLeadingError
from finetune_operator.cluster.leadership import Candidacy, LeadershipThread, RivalReleases, claim_metadata, claim_name
from finetune_operator.cluster.lease import Elector, LeaseTiming
from tests.unit.finetune_operator.cluster.fakes import Clock, FakeLeases

Document = dict[str, Any]
QUICK = LeaseTiming(15, 10, 0.01)
DEADLINE = 60


def claim(release: str, namespaces: tuple[str, ...] = (), *, version: str = "1", duration: int = 60) -> Document:
    return {
        "metadata": {"name": claim_name(release), "resourceVersion": version, **claim_metadata(namespaces)},
        "spec": {"holderIdentity": release, "leaseDurationSeconds": duration, "renewTime": "t"},
    }


def rivals_of(namespaces: tuple[str, ...], *claims: Document, clock: Callable[[], float] | None = None) -> RivalReleases:
    async def read() -> list[Document]:
        return list(claims)

    return RivalReleases(read, "system/ours", namespaces, clock or Clock())


@pytest.mark.parametrize(
    ("ours", "theirs", "shared"),
    [
        (("a", "b"), ("b", "c"), "namespace b"),
        ((), ("b", "c"), "namespace b, c"),
        (("a",), (), "namespace a"),
        ((), (), "all namespaces"),
        ((), ("a", "b", "c", "d", "e"), "namespace a, b, c and 2 more"),
    ],
)
def test_release_that_serves_the_same_namespace_is_named(ours: tuple[str, ...], theirs: tuple[str, ...], shared: str) -> None:
    refusal = asyncio.run(rivals_of(ours, claim("other-system/theirs", theirs)).find())
    assert refusal.startswith(
        f"release other-system/theirs serves {shared} already (claim finetune-operator.other-system.theirs), and two releases"
    )


def test_releases_of_other_namespaces_and_ourselves_are_no_rivals() -> None:
    found = rivals_of(("a",), claim("system/ours", ("a",)), claim("other/theirs", ("b",)))
    assert not asyncio.run(found.find())


def test_claim_without_a_readable_list_counts_as_one_to_everything() -> None:
    bare = claim("other/theirs", ("b",))
    del bare["metadata"]["annotations"]
    assert "other/theirs serves namespace a already" in asyncio.run(rivals_of(("a",), bare).find())


def test_claim_that_was_given_back_is_no_rival() -> None:
    released = claim("other/theirs")
    released["spec"]["holderIdentity"] = ""
    assert not asyncio.run(rivals_of(("a",), released).find())


def test_claim_that_has_not_changed_for_its_duration_is_no_rival_and_one_that_is_renewed_stays_one() -> None:
    clock, dead, living = Clock(), claim("other/dead", duration=15), claim("third/living", ("z",), duration=15)
    found = rivals_of(("a",), dead, living, clock=clock)
    assert "other/dead" in asyncio.run(found.find())
    clock.advance(14.9)
    assert "other/dead" in asyncio.run(found.find())
    clock.advance(0.1)
    assert not asyncio.run(found.find())
    dead["metadata"]["resourceVersion"] = "2"
    assert "other/dead" in asyncio.run(found.find())


class Claims:
    """The claims of two releases, kept as the API server keeps them."""

    def __init__(self) -> None:
        self.leases = {"system/one": FakeLeases(), "system/two": FakeLeases()}
        self.unreadable = False

    def candidacy(self, release: str, identity: str, lease: FakeLeases, namespaces: tuple[str, ...] = ()) -> Candidacy:
        async def read() -> list[Document]:
            if self.unreadable:
                raise ApiError("LIST leases", 403, "Forbidden", "because")
            return [
                claim(name, version=leases.lease["metadata"]["resourceVersion"]) | {"spec": leases.lease["spec"]}
                for name, leases in self.leases.items()
                if leases.lease is not None
            ]

        async def close() -> None:
            pass

        return Candidacy(
            lease=Elector(lease, identity, QUICK),
            claim=Elector(self.leases[release], release, QUICK),
            rivals=RivalReleases(read, release, namespaces),
            retry=0.01,
            close=close,
        )


def test_second_release_waits_until_the_first_gives_back_its_claim() -> None:
    async def scenario() -> None:
        claims, told = Claims(), []
        one = claims.candidacy("system/one", "pod-1", FakeLeases())
        await one.win(told.append)
        assert told == [""]
        two = claims.candidacy("system/two", "pod-2", FakeLeases())
        refused = asyncio.Event()

        def tell(refusal: str) -> None:
            told.append(refusal)
            refused.set()

        waiting = asyncio.create_task(two.win(tell))
        async with asyncio.timeout(DEADLINE):
            await refused.wait()
            assert "release system/one serves all namespaces already" in told[1]
            with pytest.raises(NotLeadingError):
                two.fence()
            one.fence()
            await one.withdraw()
            await waiting
        two.fence()
        assert told[2:] == [""]

    asyncio.run(scenario())


def test_of_two_releases_that_come_at_the_same_time_never_both_lead() -> None:
    async def scenario() -> None:
        for _ in range(20):
            claims = Claims()
            candidates = [claims.candidacy(f"system/{name}", name, FakeLeases()) for name in ("one", "two")]
            tasks = [asyncio.create_task(candidate.win(lambda _: None)) for candidate in candidates]
            async with asyncio.timeout(DEADLINE):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert [task.done() for task in tasks].count(True) == 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_claims_that_cannot_be_read_are_a_reason_not_to_serve() -> None:
    async def scenario() -> None:
        claims, refused, told = Claims(), asyncio.Event(), []
        claims.unreadable = True
        one = claims.candidacy("system/one", "pod-1", FakeLeases())

        def tell(refusal: str) -> None:
            told.append(refusal)
            refused.set()

        waiting = asyncio.create_task(one.win(tell))
        async with asyncio.timeout(DEADLINE):
            await refused.wait()
            claims.unreadable = False
            await waiting
        assert told == ["the claims of other releases cannot be read: LIST leases: 403 Forbidden: because", ""]

    asyncio.run(scenario())


def test_standby_that_ends_leaves_the_claim_of_its_release_alone() -> None:
    async def scenario() -> None:
        claims, lease = Claims(), FakeLeases()
        await claims.candidacy("system/one", "pod-1", lease).win(lambda _: None)
        await claims.candidacy("system/one", "pod-2", lease).withdraw()
        assert (lease.holder, claims.leases["system/one"].holder) == ("pod-1", "system/one")

    asyncio.run(scenario())


@pytest.mark.parametrize("lost", ["lease", "claim"])
def test_fence_closes_and_hold_ends_with_either_of_both(lost: str) -> None:
    async def scenario() -> None:
        claims, lease = Claims(), FakeLeases()
        one = claims.candidacy("system/one", "pod-1", lease)
        await one.win(lambda _: None)
        one.fence()
        taken = lease if lost == "lease" else claims.leases["system/one"]
        assert taken.lease is not None
        taken._store(taken.lease | {"spec": taken.lease["spec"] | {"holderIdentity": "somebody"}})
        async with asyncio.timeout(DEADLINE):
            await one.hold()
        await (one.lease if lost == "lease" else one.claim).release()
        with pytest.raises(NotLeadingError):
            one.fence()
        assert taken.holder == "somebody"

    asyncio.run(scenario())


def test_thread_tells_the_main_loop_and_gives_back_on_stop() -> None:
    async def scenario() -> None:
        claims, lease, told = Claims(), FakeLeases(), []

        async def make() -> Candidacy:
            return claims.candidacy("system/one", "me", lease)

        thread = LeadershipThread(make, told.append, on_lost=lambda: pytest.fail("lost"))
        with pytest.raises(NotLeadingError):
            thread.fence()
        thread.start()
        async with asyncio.timeout(DEADLINE):
            await thread.held.wait()
        thread.fence()
        assert (lease.holder, claims.leases["system/one"].holder, told) == ("me", "system/one", [""])
        await thread.stop()
        assert (lease.holder, claims.leases["system/one"].holder) == ("", "")
        with pytest.raises(NotLeadingError):
            thread.fence()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [RuntimeError("no credentials"), ApiUnreachableError("away")])
def test_thread_that_fails_ends_the_replica(error: Exception) -> None:
    async def scenario() -> None:
        lost = threading.Event()

        async def make() -> Candidacy:
            raise error

        LeadershipThread(make, on_lost=lost.set).start()
        assert await asyncio.to_thread(lost.wait, DEADLINE)

    asyncio.run(scenario())


def test_thread_whose_lease_is_taken_says_so_and_does_not_give_it_back() -> None:
    async def scenario() -> None:
        claims, lease, lost = Claims(), FakeLeases(), threading.Event()

        async def make() -> Candidacy:
            return claims.candidacy("system/one", "me", lease)

        thread = LeadershipThread(make, on_lost=lost.set)
        thread.start()
        async with asyncio.timeout(DEADLINE):
            await thread.held.wait()
        assert lease.lease is not None
        lease._store(lease.lease | {"spec": lease.lease["spec"] | {"holderIdentity": "other"}})
        assert await asyncio.to_thread(lost.wait, DEADLINE)
        await thread.stop()
        assert lease.holder == "other"

    asyncio.run(scenario())


def test_thread_that_is_stopped_before_it_has_begun_competes_for_nothing() -> None:
    async def scenario() -> None:
        async def make() -> Candidacy:
            pytest.fail("made")

        thread = LeadershipThread(make, on_lost=lambda: pytest.fail("lost"))
        await thread.stop()
        thread.start()
        await asyncio.to_thread(thread._thread.join, DEADLINE)
        assert not thread._thread.is_alive()

    asyncio.run(scenario())

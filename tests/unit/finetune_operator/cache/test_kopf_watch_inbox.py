"""Events cross from kopf's thread to the main loop in their order, in groups, and none is left behind."""

import asyncio
from typing import Any

import pytest

from finetune_operator.cache import kopf_watch as watch
from finetune_operator.cache.kopf_watch import HAND_OVER_SECONDS, MOST_AT_ONCE, Watches
from finetune_operator.client.kinds import JOBS, WATCHED, Kind
from tests.unit.finetune_operator import objects

NUM_EVENTS = 3 * MOST_AT_ONCE + 7


def job(number: int) -> dict[str, Any]:
    return objects.finetune_job(version=number + 1)


def version_of(document: Any) -> int:
    return int(document["metadata"]["resourceVersion"])


def send(watches: Watches, number: int) -> None:
    """So many events, as kopf's thread brings them while the main loop is busy."""
    handler = watches._handler(JOBS)
    for place in range(number):
        with pytest.raises(StopIteration):
            handler(event={"type": "MODIFIED", "object": job(place)}).send(None)


async def settle() -> None:
    await asyncio.sleep(5 * HAND_OVER_SECONDS)


def received(number: int, broken_at: int = -1) -> list[int]:
    """Versions that the sink got, of so many that were sent."""

    async def scenario() -> list[int]:
        versions: list[int] = []
        complete = asyncio.Event()

        def sink(_kind: Kind, _is_deleted: bool, document: Any) -> None:
            versions.append(version_of(document))
            if len(versions) == number:
                complete.set()
            if version_of(document) == broken_at:
                raise ValueError("an object that nobody thought of")

        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        watches = Watches(("team",), sink)
        async with asyncio.timeout(10):
            send(watches, number)
            assert versions == []
            await complete.wait()
        return versions

    return asyncio.run(scenario())


def test_all_events_arrive_in_order() -> None:
    assert received(NUM_EVENTS) == list(range(1, NUM_EVENTS + 1))


async def test_age_of_a_kind_starts_again_with_each_event() -> None:
    watches = Watches(("team",), lambda _kind, _is_deleted, _document: None)
    before = watches.ages()
    assert set(before) == {kind.name for kind in WATCHED}
    watches._heard = dict.fromkeys(before, -1e9)
    send(watches, 1)
    young = [name for name, seconds in watches.ages().items() if seconds < 60]
    assert young == [JOBS.name]


def test_deletion_is_reported_as_one_and_everything_else_is_not() -> None:
    async def scenario() -> list[tuple[int, bool]]:
        told: list[tuple[int, bool]] = []
        watches = Watches(("team",), lambda _kind, is_deleted, document: told.append((version_of(document), is_deleted)))
        handler = watches._handler(JOBS)
        # A listed object has no type.
        for number, kind in enumerate((None, "ADDED", "MODIFIED", "DELETED")):
            with pytest.raises(StopIteration):
                handler(event={"type": kind, "object": job(number)}).send(None)
        await settle()
        return told

    assert asyncio.run(scenario()) == [(1, False), (2, False), (3, False), (4, True)]


async def test_watches_that_were_started_again_ask_for_what_they_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RESTART_FIRST", 0.0)
    watches = Watches(("team",), lambda _kind, _is_deleted, _document: None)
    runs: list[int] = []

    async def watched() -> None:
        runs.append(len(runs))
        if len(runs) == 2:
            watches._is_stopped.set()
        raise OSError("etcd is away")

    monkeypatch.setattr(watches, "_watch", watched)
    await asyncio.to_thread(watches._run)
    await settle()
    assert len(runs) == 2
    assert watches.num_restarts == 1
    assert watches.restarted.is_set()


@pytest.mark.parametrize("broken_at", [1, 5, MOST_AT_ONCE])
def test_event_that_cannot_be_taken_in_strands_none_behind_it(broken_at: int) -> None:
    assert received(NUM_EVENTS, broken_at) == list(range(1, NUM_EVENTS + 1))

"""Events cross from kopf's thread to the main loop in their order, in groups, and none is left behind."""

import asyncio
from typing import Any

import pytest

from finetune_operator.cluster.kinds import JOBS, WRITTEN_BY_USERS, Kind
from finetune_operator.cluster.projection import Held, project
from finetune_operator.watch import MOST_AT_ONCE, Watches
from tests.unit.operator_effects import objects

NUM_EVENTS = 3 * MOST_AT_ONCE + 7


def job(number: int) -> dict[str, Any]:
    return objects.finetune_job(version=number + 1)


def send(watches: Watches, number: int) -> None:
    """So many events, as kopf's thread brings them while the main loop is busy."""
    handler = watches._handler(JOBS)
    for place in range(number):
        with pytest.raises(StopIteration):
            handler(event={"type": "MODIFIED", "object": job(place)}).send(None)


def received(number: int, broken_at: int = -1) -> list[int]:
    """Versions that the sink got, of so many that were sent."""

    async def scenario() -> list[int]:
        versions: list[int] = []
        complete = asyncio.Event()

        def sink(_kind: Kind, _is_deleted: bool, held: Held) -> None:
            versions.append(held.key.version)
            if len(versions) == number:
                complete.set()
            if held.key.version == broken_at:
                raise ValueError("an object that nobody thought of")

        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        watches = Watches(("team",), project, sink)
        async with asyncio.timeout(10):
            send(watches, number)
            assert versions == []
            await complete.wait()
        return versions

    return asyncio.run(scenario())


def test_all_events_arrive_in_order() -> None:
    assert received(NUM_EVENTS) == list(range(1, NUM_EVENTS + 1))


def test_age_of_a_kind_starts_again_with_each_event() -> None:
    async def scenario() -> None:
        watches = Watches(("team",), project, lambda _kind, _is_deleted, _held: None)
        before = watches.ages()
        assert set(before) == {kind.name for kind in WRITTEN_BY_USERS}
        watches._heard = dict.fromkeys(before, -1e9)
        send(watches, 1)
        young = [name for name, seconds in watches.ages().items() if seconds < 60]
        assert young == [JOBS.name]

    asyncio.run(scenario())


@pytest.mark.parametrize("broken_at", [1, 5, MOST_AT_ONCE])
def test_event_that_cannot_be_taken_in_strands_none_behind_it(broken_at: int) -> None:
    assert received(NUM_EVENTS, broken_at) == list(range(1, NUM_EVENTS + 1))

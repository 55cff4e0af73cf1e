import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_operator.queue.workqueue import LONGEST_PATIENCE, QueueClosedError, Urgency, WorkQueue
from tests.unit.finetune_operator.fakes import Clock


def queue(clock: Clock | None = None) -> WorkQueue[str]:
    return WorkQueue(retry_first=1.0, retry_longest=8.0, clock=clock or Clock())


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(bounded())


async def test_key_added_twice_is_handed_out_once() -> None:
    keys = queue()
    for key in ("a", "b", "a"):
        keys.add(key)
    assert [await keys.get(), await keys.get()] == ["a", "b"]
    assert len(keys) == 0


async def test_key_added_while_taken_comes_back_after_done_and_not_before() -> None:
    keys = queue()
    keys.add("a")
    assert await keys.get() == "a"
    keys.add("a")
    assert len(keys) == 0
    keys.done("a")
    assert await keys.get() == "a"


async def test_delayed_key_waits_for_its_time_and_the_earlier_time_wins() -> None:
    clock = Clock()
    keys = queue(clock)
    keys.add_after("a", 10)
    keys.add_after("a", 3)
    keys.add_after("a", 7)
    keys.add_after("b", 5)
    assert keys.num_delayed == 2
    assert keys._seconds_to_next() == 3
    clock.now += 3
    assert await keys.get() == "a"
    clock.now += 2
    assert await keys.get() == "b"
    assert keys.num_delayed == 0


async def test_adding_now_replaces_a_delayed_addition() -> None:
    clock = Clock()
    keys = queue(clock)
    keys.add_after("a", 5)
    keys.add("a")
    assert await keys.get() == "a"
    keys.done("a")
    clock.now += 10
    keys.add("b")
    assert await keys.get() == "b"
    assert len(keys) == 0


def test_retries_double_up_to_the_longest_and_start_over_after_success() -> None:
    keys = queue()
    assert [keys.retry("a") for _ in range(5)] == [1, 2, 4, 8, 8]
    keys.forget("a")
    assert keys.retry("a") == 1
    assert keys.retry("a", at_least=30) == 30


async def test_waiting_worker_is_woken_by_an_addition_and_by_a_delay_that_ends() -> None:
    keys: WorkQueue[str] = WorkQueue(retry_first=1, retry_longest=1)
    taker = asyncio.create_task(keys.get())
    await asyncio.sleep(0)
    keys.add("a")
    assert await taker == "a"
    keys.add_after("b", 0.01)
    assert await keys.get() == "b"


async def test_closed_queue_ends_its_workers_and_drains() -> None:
    keys = queue()
    keys.add("a")
    assert await keys.get() == "a"
    taker = asyncio.create_task(keys.get())
    await asyncio.sleep(0)
    keys.close()
    with pytest.raises(QueueClosedError):
        await taker
    keys.add("b")
    assert len(keys) == 0


@given(st.lists(st.tuples(st.sampled_from(["add", "get", "done", "after"]), st.sampled_from("abc")), max_size=60))
def test_no_key_is_taken_twice_at_a_time_and_none_is_lost(steps: list[tuple[str, str]]) -> None:
    async def scenario() -> None:
        clock = Clock()
        keys = queue(clock)
        taken: list[str] = []
        owed: set[str] = set()
        for action, key in steps:
            clock.now += 1
            if action == "add":
                keys.add(key)
                owed.add(key)
            elif action == "after":
                keys.add_after(key, 1)
                owed.add(key)
            elif action == "done" and key in taken:
                taken.remove(key)
                keys.done(key)
            elif action == "get" and len(keys):
                key = await keys.get()
                assert key not in taken
                taken.append(key)
                owed.discard(key)
        for key in taken:
            keys.done(key)
        clock.now += 10
        while len(keys) or keys.num_delayed:
            key = await keys.get()
            owed.discard(key)
            keys.done(key)
        assert not owed

    run(scenario())


async def drained(keys: WorkQueue[str]) -> list[str]:
    """Everything that can be taken now, in order."""
    found = []
    while len(keys):
        found.append(await keys.get())
        keys.done(found[-1])
    return found


async def test_newcomers_come_first_then_what_is_begun_then_changes() -> None:
    clock = Clock()
    keys = queue(clock)
    keys.add("begun", Urgency.NEW)
    assert await keys.get() == "begun"
    keys.add("changed", Urgency.CHANGED)
    keys.requeue_now("begun")
    keys.done("begun")
    keys.add("new", Urgency.NEW)
    assert await drained(keys) == ["new", "begun", "changed"]


async def test_job_that_was_begun_is_finished_before_the_next_is_begun() -> None:
    # Newcomers are answered first; from then on each job goes through all of its passes before the next job's second one.
    clock = Clock()
    keys = queue(clock)
    passes: list[str] = []
    for key in ("a", "b", "c"):
        keys.add(key, Urgency.NEW)
        clock.now += 0.001
    while len(keys):
        key = await keys.get()
        passes.append(key)
        clock.now += 0.1
        if passes.count(key) < 4:
            keys.requeue_now(key)
        keys.done(key)
    assert "".join(passes) == "abc" + "aaa" + "bbb" + "ccc"


def test_long_waits_that_end_let_short_ones_and_changes_go_first() -> None:
    async def scenario() -> None:
        clock = Clock()
        keys = queue(clock)
        keys.add_after("resync", 600.0)
        clock.now += 599.0
        keys.add_after("short", 1.0)
        clock.now += 1.0
        keys.add("changed")
        assert await drained_when_due(keys) == ["short", "changed", "resync"]

    async def drained_when_due(keys: WorkQueue[str]) -> list[str]:
        first = await keys.get()
        keys.done(first)
        return [first, *await drained(keys)]

    run(scenario())


async def test_resting_key_is_not_taken_early_whoever_adds_it() -> None:
    clock = Clock()
    keys = queue(clock)
    keys.add("a")
    assert await keys.get() == "a"
    keys.rest("a", 10)
    keys.requeue_now("a")
    keys.done("a")
    keys.add("a", Urgency.NEW)
    keys.add_after("a", 1)
    clock.now += 9.9
    keys.add("b")
    assert await drained(keys) == ["b"]
    assert keys.num_delayed == 1
    clock.now += 0.1
    assert await keys.get() == "a"
    keys.done("a")
    keys.add("a")
    assert await drained(keys) == ["a"]


async def test_rest_that_is_shorter_than_one_before_does_not_end_it() -> None:
    clock = Clock()
    keys = queue(clock)
    keys.rest("a", 10)
    keys.rest("a", 1)
    keys.add("a")
    clock.now += 5
    assert len(keys) == 0
    clock.now += 5
    assert await keys.get() == "a"


async def test_time_in_the_queue_is_measured_from_when_the_key_could_be_taken() -> None:
    clock = Clock()
    waits: list[float] = []
    keys: WorkQueue[str] = WorkQueue(retry_first=1, retry_longest=1, clock=clock, waited=waits.append)
    keys.add("a")
    clock.now += 2
    keys.add("a", Urgency.NEW)
    clock.now += 1
    await keys.get()
    keys.add_after("b", 5)
    clock.now += 6
    await keys.get()
    keys.requeue_now("b")
    clock.now += 3
    keys.done("b")
    await keys.get()
    assert waits == [3.0, 1.0, 3.0]


@given(st.lists(st.tuples(st.sampled_from(list(Urgency)), st.floats(0, 20), st.integers(0, 2)), min_size=1, max_size=60))
def test_nothing_is_overtaken_by_what_came_much_later(steps: list[tuple[Urgency, float, int]]) -> None:
    async def scenario() -> None:
        clock = Clock()
        keys: WorkQueue[int] = WorkQueue(retry_first=1, retry_longest=1, clock=clock)
        added: dict[int, float] = {}
        for number, (urgency, pause, num_taken) in enumerate(steps):
            clock.now += pause
            keys.add(number, urgency)
            added[number] = clock.now
            for _ in range(min(num_taken, len(keys))):
                key = await keys.get()
                assert added[key] - min(added.values()) <= LONGEST_PATIENCE
                del added[key]
                keys.done(key)

    run(scenario())


async def test_a_key_wakes_one_of_the_waiting_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    collect_due = WorkQueue._collect_due

    def counted(keys: WorkQueue[str]) -> None:
        nonlocal looks
        looks += 1
        collect_due(keys)

    keys, taken = queue(), list[str]()

    async def work() -> None:
        while True:
            key = await keys.get()
            taken.append(key)
            await asyncio.sleep(0)
            keys.done(key)

    workers = [asyncio.create_task(work()) for _ in range(50)]
    for _ in range(5):
        await asyncio.sleep(0)
    monkeypatch.setattr(WorkQueue, "_collect_due", counted)
    for number in range(20):
        keys.add(f"key-{number}")
        for _ in range(5):
            await asyncio.sleep(0)
    assert taken == [f"key-{number}" for number in range(20)]
    assert looks <= 20 * 4
    keys.close()
    ended = await asyncio.gather(*workers, return_exceptions=True)
    assert [type(end) for end in ended] == [QueueClosedError] * 50


async def test_keys_that_come_together_are_worked_on_together() -> None:
    keys, together = queue(), asyncio.Barrier(3)

    async def work() -> None:
        await keys.get()
        await together.wait()

    workers = [asyncio.create_task(work()) for _ in range(3)]
    await asyncio.sleep(0)
    for key in "abc":
        keys.add(key)
    await asyncio.gather(*workers)

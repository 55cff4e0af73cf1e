import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_operator.workqueue import QueueClosedError, WorkQueue
from tests.unit.operator_effects.fakes import Clock


def queue(clock: Clock | None = None) -> WorkQueue[str]:
    return WorkQueue(retry_first=1.0, retry_longest=8.0, clock=clock or Clock())


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


def test_key_added_twice_is_handed_out_once() -> None:
    async def scenario() -> None:
        keys = queue()
        for key in ("a", "b", "a"):
            keys.add(key)
        assert [await keys.get(), await keys.get()] == ["a", "b"]
        assert len(keys) == 0

    run(scenario())


def test_key_added_while_taken_comes_back_after_done_and_not_before() -> None:
    async def scenario() -> None:
        keys = queue()
        keys.add("a")
        assert await keys.get() == "a"
        keys.add("a")
        assert len(keys) == 0
        keys.done("a")
        assert await keys.get() == "a"

    run(scenario())


def test_delayed_key_waits_for_its_time_and_the_earlier_time_wins() -> None:
    async def scenario() -> None:
        clock = Clock()
        keys = queue(clock)
        keys.add_after("a", 10)
        keys.add_after("a", 3)
        keys.add_after("a", 7)
        keys.add_after("b", 5)
        assert keys.num_delayed == 2
        clock.now += 3
        assert await keys.get() == "a"
        clock.now += 2
        assert await keys.get() == "b"
        assert keys.num_delayed == 0

    run(scenario())


def test_adding_now_replaces_a_delayed_addition() -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_retries_double_up_to_the_longest_and_start_over_after_success() -> None:
    keys = queue()
    assert [keys.retry("a") for _ in range(5)] == [1, 2, 4, 8, 8]
    keys.forget("a")
    assert keys.retry("a") == 1
    assert keys.retry("a", at_least=30) == 30


def test_waiting_worker_is_woken_by_an_addition_and_by_a_delay_that_ends() -> None:
    async def scenario() -> None:
        keys: WorkQueue[str] = WorkQueue(retry_first=1, retry_longest=1)
        taker = asyncio.create_task(keys.get())
        await asyncio.sleep(0)
        keys.add("a")
        assert await taker == "a"
        keys.add_after("b", 0.01)
        assert await keys.get() == "b"

    run(scenario())


def test_closed_queue_ends_its_workers_and_drains() -> None:
    async def scenario() -> None:
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

    run(scenario())


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

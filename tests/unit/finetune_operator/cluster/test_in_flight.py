import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from finetune_operator.cluster.in_flight import RequestLimiter
from tests.unit.finetune_operator.cluster.fakes import Clock


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await scenario()

    return asyncio.run(bounded())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_no_more_requests_than_the_limit_and_in_the_order_of_their_arrival() -> None:
    async def scenario() -> None:
        limit, begun, end = RequestLimiter(most=2, clock=Clock()), list[int](), asyncio.Event()

        async def request(number: int) -> None:
            async with limit.slot():
                begun.append(number)
                await end.wait()

        tasks = [asyncio.create_task(request(number)) for number in range(5)]
        await settle()
        assert begun == [0, 1]
        assert limit.num_running == 2
        end.set()
        await settle()
        assert begun == [0, 1, 2, 3, 4]
        assert limit.num_running == 0
        assert all(task.done() for task in tasks)

    run(scenario)


def test_refusal_halves_the_limit_once_and_success_lets_it_grow_back() -> None:
    clock = Clock()
    limit = RequestLimiter(most=40, least=2, clock=clock)
    limit.was_too_much()
    limit.was_too_much()
    assert limit.limit == 20
    clock.now += 1.0
    limit.was_too_much()
    assert limit.limit == 10
    for _ in range(11):
        limit.went_well()
    assert limit.limit == 11
    for _ in range(2000):
        limit.went_well()
    assert limit.limit == 40
    for _ in range(10):
        clock.now += 1.0
        limit.was_too_much()
    assert limit.limit == 2


def test_lower_limit_holds_for_those_that_wait_already() -> None:
    async def scenario() -> None:
        clock = Clock()
        limit, begun, ends = RequestLimiter(most=4, least=1, clock=clock), list[int](), [asyncio.Event() for _ in range(8)]

        async def request(number: int) -> None:
            async with limit.slot():
                begun.append(number)
                await ends[number].wait()

        tasks = [asyncio.create_task(request(number)) for number in range(8)]
        await settle()
        limit.was_too_much()
        for number in range(3):
            ends[number].set()
        await settle()
        assert begun == [0, 1, 2, 3, 4]
        assert limit.num_running == 2
        for end in ends:
            end.set()
        await asyncio.gather(*tasks)

    run(scenario)


@pytest.mark.parametrize("let_in_first", [False, True])
def test_waiting_request_that_is_cancelled_leaves_no_place_taken(let_in_first: bool) -> None:
    async def scenario() -> None:
        limit = RequestLimiter(most=1, least=1, clock=Clock())

        async def request() -> None:
            async with limit.slot():
                pass

        async with limit.slot():
            waiting = asyncio.create_task(request())
            await settle()
            if not let_in_first:
                waiting.cancel()
                await settle()
        # Its turn has come, and it has not run since.
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert limit.num_running == 0
        await request()

    run(scenario)


def test_request_that_fails_gives_its_place_back() -> None:
    async def scenario() -> None:
        limit = RequestLimiter(most=1, clock=Clock())
        with pytest.raises(ValueError, match="broken"):
            async with limit.slot():
                raise ValueError("broken")
        assert limit.num_running == 0

    run(scenario)


def test_slow_answer_and_none_at_all_halve_the_limit_and_a_broken_connection_does_not() -> None:
    async def scenario() -> None:
        clock = Clock()
        limit = RequestLimiter(most=40, clock=clock)

        async def request(seconds: float, end: Exception | None = None) -> None:
            async with limit.slot():
                clock.now += seconds
                if end is not None:
                    raise end

        await request(2.0)
        assert limit.limit == 40
        await request(2.1)
        assert limit.limit == 20
        with pytest.raises(TimeoutError):
            await request(1.0, TimeoutError())
        assert limit.limit == 10
        with pytest.raises(ConnectionResetError):
            await request(30.0, ConnectionResetError())
        assert limit.limit == 10
        assert limit.num_running == 0

    run(scenario)

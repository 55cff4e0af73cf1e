import asyncio

from finetune_operator.cluster.token_bucket import TokenBucket
from tests.unit.operator_effects.fakes import Clock


def test_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(rate=10, burst=5, clock=clock, sleep=clock.sleep)

    async def take(number: int) -> list[float]:
        times = []
        for _ in range(number):
            await bucket.take()
            times.append(round(clock.now - 1000.0, 3))
        return times

    assert asyncio.run(take(8)) == [0, 0, 0, 0, 0, 0.1, 0.2, 0.3]
    clock.now += 100
    assert asyncio.run(take(6))[4:] == [100.3, 100.4]


def test_simultaneous_callers_reserve_tokens_in_turn() -> None:
    clock = Clock()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 3))

    bucket = TokenBucket(rate=2, burst=1, clock=clock, sleep=sleep)

    async def together() -> None:
        await asyncio.gather(*(bucket.take() for _ in range(4)))

    asyncio.run(together())
    assert waits == [0.5, 1.0, 1.5]

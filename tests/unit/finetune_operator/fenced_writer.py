"""A replica of a lease and writes alone: `python -m tests.unit.finetune_operator.fenced_writer SERVER` writes as fast as
it can.

It does not end when the lease is lost, so that nothing but the fence stops it: after that each writer tries again and again.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kubernetes.aio.client.configuration import Configuration

from finetune_operator.client.answers import ApiUnreachableError
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import CONFIG_MAPS
from finetune_operator.leader.leadership import LeadershipThread
from finetune_operator.leader.lease import Elector, LeaseObject, LeaseTiming

TIMING = LeaseTiming(duration=8, renew_deadline=5, retry=0.2)
WRITERS = 40
TRIES_AFTER_THE_LOSS = 200


async def main(server: str) -> None:
    lost = asyncio.Event()
    loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def make() -> AsyncIterator[Elector]:
        api = Api(Configuration(host=server), request_timeout=TIMING.renew_deadline / 2)
        yield Elector(LeaseObject(api, "system", "release"), "first", TIMING)
        await api.close()

    lease = LeadershipThread(make, on_lost=lambda: loop.call_soon_threadsafe(lost.set))
    api = Api(Configuration(host=server), fence=lease.fence)
    lease.start()
    await lease.held.wait()

    async def write() -> None:
        left = TRIES_AFTER_THE_LOSS
        while left:
            left -= lost.is_set()
            try:
                await api.create(CONFIG_MAPS, "team", {})
            except ApiUnreachableError:
                await asyncio.sleep(0.001)

    await asyncio.gather(*(write() for _ in range(WRITERS)))
    await api.close()
    await lease.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""How late the event loop is: what a probe, a renewed lease or a user waits because of work that does not yield."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_SECONDS = 0.25


async def measure_loop_lag(lagged: Callable[[float], None], period: float = PERIOD_SECONDS) -> None:
    """Tell by how many seconds each sleep ended too late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period
        await asyncio.sleep(period)
        lagged(max(loop.time() - due, 0.0))

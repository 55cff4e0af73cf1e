"""A limit on the rate of API writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class TokenBucket:
    """Lets `burst` callers through at once and `rate` per second after that, in the order of their arrival."""

    def __init__(
        self,
        rate: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._clock = clock
        self._sleep = sleep
        self._filled_at = clock()

    async def take(self) -> None:
        """Wait for a token. Tokens are reserved before the wait, so nobody overtakes."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        self._tokens -= 1.0
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate)

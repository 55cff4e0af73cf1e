"""Limits the requests under way to as many as the API server can take, which is found by trying.

API Priority and Fairness gives every client seats, and answers 429 with Retry-After to those that want more. So there is no
fixed rate to set per cluster: the limit starts high, is halved when the server asks to wait or answers slowly or not at all,
and grows by one for each round of requests that went well. Slowness counts because requests that wait at a busy server gain
nothing, and hold up those of others, and the renewal of our own lease.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

MOST = 50
LEAST = 2
SLOW_SECONDS = 2.0
"""An answer that takes longer comes from an overloaded server; otherwise it takes milliseconds."""
HALVE_SECONDS = 1.0
"""Refusals within this time after the last halving belong to the same overload."""


class RequestLimiter:
    """Lets requests through in the order of their arrival."""

    def __init__(self, most: int = MOST, least: int = LEAST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = float(most)
        self._least = float(least)
        self._limit = float(most)
        self._clock = clock
        self._halved_at = float("-inf")
        self.num_running = 0
        """Requests under way."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Requests that may be under way now."""
        return int(self._limit)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn; the request is under way as long as the context is open."""
        if self.num_running >= self.limit or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()
                raise
        else:
            self.num_running += 1
        begun = self._clock()
        try:
            yield
        except TimeoutError:
            self.was_too_much()
            raise
        else:
            if self._clock() - begun > SLOW_SECONDS:
                self.was_too_much()
        finally:
            self._leave()

    def went_well(self) -> None:
        """Raise the limit a little after an answer."""
        self._limit = min(self._most, self._limit + 1.0 / self._limit)
        self._let_in()

    def was_too_much(self) -> None:
        """Halve the limit, because the server asked for a pause or is slow."""
        now = self._clock()
        if now - self._halved_at >= HALVE_SECONDS:
            self._halved_at = now
            self._limit = max(self._least, self._limit / 2.0)

    def _leave(self) -> None:
        self.num_running -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.num_running < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                # It is counted here and not by the waiting request: until that runs, no other may take its place.
                self.num_running += 1
                turn.set_result(None)

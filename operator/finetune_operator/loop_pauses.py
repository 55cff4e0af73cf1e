"""Makes garbage collections rare, because they pause the event loop, and measures how late the loop is.

Objects that the cache replaces are freed at once by their reference count. A collection of the oldest generation finds next to
nothing, yet it visits every object of the cache in the middle of whatever pass runs at that moment: with the interpreter's own
thresholds ten thousand objects cost 0.2 s each time, and again whenever the cache has grown by a quarter.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

THRESHOLDS = (50_000, 10, 10)
"""New containers before a collection of the youngest generation, which takes about a millisecond; ten of those before one of
the next. So the oldest is collected after five million."""


def collect_rarely() -> None:
    """Raise the thresholds, so that short-lived objects are freed before the collector looks for them."""
    gc.set_threshold(*THRESHOLDS)


def freeze_objects() -> None:
    """Collect once, and exclude what is left from later collections: the code, and the objects of the first list."""
    gc.collect()
    gc.freeze()


PERIOD_SECONDS = 0.25


async def measure_loop_lag(lagged: Callable[[float], None], period: float = PERIOD_SECONDS) -> None:
    """Report by how many seconds each sleep ended too late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period
        await asyncio.sleep(period)
        lagged(max(loop.time() - due, 0.0))

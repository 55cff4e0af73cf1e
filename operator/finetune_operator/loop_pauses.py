"""Pauses of the event loop: garbage collections, made rare, and how late the loop is, measured.

What the cache replaces is freed by its reference count, at once. A collection of the oldest generation finds next to nothing,
yet it visits every object of the cache in the middle of whatever pass runs at that moment: with the interpreter's own
thresholds ten thousand objects cost 0.2 s each time, and again whenever the cache has grown by a quarter.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

THRESHOLDS = (50_000, 10, 10)
"""New containers before a collection of the youngest generation, which takes about a millisecond; ten of those before one of
the next. So the oldest is looked at after five million."""


def collect_rarely() -> None:
    """Let what is short-lived die by itself before it is looked for."""
    gc.set_threshold(*THRESHOLDS)


def freeze_objects() -> None:
    """Collect once, and never visit again what is left: the code, and what the first list brought."""
    gc.collect()
    gc.freeze()


PERIOD_SECONDS = 0.25


async def measure_loop_lag(lagged: Callable[[float], None], period: float = PERIOD_SECONDS) -> None:
    """Tell by how many seconds each sleep ended too late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period
        await asyncio.sleep(period)
        lagged(max(loop.time() - due, 0.0))

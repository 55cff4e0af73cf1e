"""What the training loop tells the watchdog: the latest thing that this rank has finished or begun."""

from __future__ import annotations

import time
from dataclasses import dataclass

STEP = "step"
"""A finished optimizer step. Until the first one everything counts as long: models are loaded, kernels compiled, caches cold."""


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    what: str
    step: int
    at: float
    """On this process's monotonic clock."""
    is_long: bool
    """What follows may take longer than a step."""


class Heartbeat:
    """Written by the main thread of a rank, read by its watchdog; one reference is replaced at a time, so no lock is needed."""

    def __init__(self) -> None:
        self.latest = Beat("start", 0, time.monotonic(), is_long=True)
        self._has_stepped = False

    def beat(self, what: str, step: int) -> None:
        """`what` has been finished after optimizer step `step`: `STEP`, an evaluation batch, a save, a part of the export."""
        self._has_stepped = self._has_stepped or what == STEP
        self.latest = Beat(what, step, time.monotonic(), is_long=not self._has_stepped)

    def begin(self, what: str, step: int) -> None:
        """`what` begins and may take longer than a step: the export, a save of the whole model."""
        self.latest = Beat(what, step, time.monotonic(), is_long=True)

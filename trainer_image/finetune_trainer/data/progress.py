"""Shows the progress of preparing data: a bar on a terminal, otherwise a line in the log every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

log = logging.getLogger(__name__)
LOG_SECONDS = 10.0
"""Time between two log lines."""


class PreparingProgress:
    """Counts the bytes of the source files that are prepared, and shows the progress."""

    def __init__(self, total_bytes: int) -> None:
        self._total, self._done = total_bytes, 0
        self._started = self._logged = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total_bytes, desc="preparing", unit="B", unit_scale=True) if is_terminal else None

    def advance(self, num_bytes: int) -> None:
        """Count bytes that have been prepared."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            log.info("%s", line(self._done, self._total, self._logged - self._started))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            log.info("%s", line(self._done, self._total, time.monotonic() - self._started))


def line(done: int, total: int, seconds: float) -> str:
    """Format a line such as `prepared 120 of 1000 MB, 18.2 MB/s, 48 s left`."""
    rate = done / max(seconds, 1e-9)
    left = f", {(total - done) / rate:.0f} s left" if 0 < done < total else ""
    return f"prepared {done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s{left}"

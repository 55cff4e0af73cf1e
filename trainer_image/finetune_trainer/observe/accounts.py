"""Rank 0's records of how this attempt spends its time, beside those of earlier attempts on the workspace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_trainer.observe.goodput import Accounts, Activity, AttemptStarted, Record, TimeSpent, accounts, parsed
from finetune_trainer.observe.lines import JsonLines, read_lines

LONGEST_GAP_SECONDS = 60.0
"""Between two records: what a killed attempt did after its last one is not told from the time until the next attempt."""


class Stopwatch:
    """Divides the time since the start of this process among activities; at each moment there is exactly one."""

    def __init__(self, age_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = {Activity.STARTUP: age_seconds}
        self._activity, self._since = Activity.STARTUP, clock()

    def seconds(self) -> dict[Activity, float]:
        """Until now."""
        self._close()
        return dict(self._seconds)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Time in the body belongs to `activity`, time after it to none in particular; start-up ends with the first step."""
        is_starting = self._activity is Activity.STARTUP and activity is not Activity.STEPS
        self._turn_to(activity)
        try:
            yield
        finally:
            self._turn_to(Activity.STARTUP if is_starting else Activity.OTHER)

    def move(self, seconds: float, source: Activity, target: Activity) -> None:
        """Count seconds otherwise, at most as many as there are."""
        moved = min(seconds, self._seconds.get(source, 0.0))
        self._seconds[source] = self._seconds.get(source, 0.0) - moved
        self._seconds[target] = self._seconds.get(target, 0.0) + moved

    def _turn_to(self, activity: Activity) -> None:
        self._close()
        self._activity = activity

    def _close(self) -> None:
        now = self._clock()
        self._seconds[self._activity] = self._seconds.get(self._activity, 0.0) + now - self._since
        self._since = now


class AccountBook:
    """Accounts of all attempts, and the file that they are in."""

    def __init__(self, path: Path, attempt: int, resumed_step: int, stopwatch: Stopwatch, now: float) -> None:
        """`now`: seconds since the epoch. Raises OSError where the file cannot be opened."""
        earlier: list[Record] = parsed(read_lines(path.read_text(errors="replace"))) if path.exists() else []
        self._attempt, self._stopwatch = attempt, stopwatch
        self._start = AttemptStarted(attempt=attempt, time=now - sum(stopwatch.seconds().values()), step=resumed_step)
        self._before = accounts([*earlier, self._start])
        self._lines = JsonLines(path)
        self._lines.append(self._start.model_dump(mode="json"))
        self._written_at = self._start.time

    def accounts(self) -> Accounts:
        """Until now."""
        return self._before.plus(self._stopwatch.seconds())

    def record(self, step: int, *, always: bool) -> None:
        """Write where this attempt stands; unless `always`, only when the latest record is old."""
        seconds = self._stopwatch.seconds()
        now = self._start.time + sum(seconds.values())
        if always or now - self._written_at >= LONGEST_GAP_SECONDS:
            self._lines.append(TimeSpent(attempt=self._attempt, time=now, step=step, seconds=seconds).model_dump(mode="json"))
            self._written_at = now

    def close(self, step: int) -> None:
        """The last record."""
        self.record(step, always=True)
        self._lines.close()


def process_age_seconds() -> float:
    """Time since the kernel started this process; 0 where it does not say."""
    try:
        # Field 22 of proc(5)'s stat, counted behind the name, which may hold spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))

"""Files to which rank 0 appends JSON lines: the history, a line for each optimizer step, and how attempts spend time.

Both cover the whole job with all attempts; lines that a crash cut off are completed or left out when they are read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune_trainer.files import read_own, write_durably
from finetune_trainer.json_lines import JsonLines, read_lines
from finetune_trainer.observe.goodput import (
    Activity,
    AttemptLosses,
    AttemptStarted,
    GoodputRecord,
    GoodputTotals,
    TimeSpent,
    attempt_losses,
    goodput_totals,
    parse_records,
)

LONGEST_GAP_SECONDS = 60.0
"""Longest time between two records: what a killed attempt did after its last one counts as the time until the next attempt."""


def kept_lines(text: str, resumed_step: int) -> list[dict[str, Any]]:
    """The lines up to the resumed step. Later ones are written again, and a line cut off by a crash is dropped."""
    return [line for line in read_lines(text) if isinstance(line.get("step"), int) and line["step"] <= resumed_step]


class History:
    """Appends lines. Losing the last ones in a crash does no harm, because a resumed run writes them again."""

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        """resumed_step: None for a run from the start. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        before = read_own(path).decode(errors="replace") if path.exists() and resumed_step is not None else ""
        kept = kept_lines(before, resumed_step or 0)
        write_durably(path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        self._lines = JsonLines(path)
        self.tokens: int = sum(line.get("tokens", 0) for line in kept)
        """Number of tokens computed in all steps that count."""
        self.resumed: dict[str, Any] = kept[-1] if kept else {}
        """Line of the step after which the run continues."""

    def append(self, **values: Any) -> None:
        """Add one line without values that are None."""
        self.tokens += values.get("tokens", 0)
        self._lines.append({name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class Stopwatch:
    """Divides the time since the start of this process among activities; at each moment there is exactly one."""

    def __init__(self, age_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = {Activity.STARTUP: age_seconds}
        self._activity, self._since = Activity.STARTUP, clock()

    def seconds(self) -> dict[Activity, float]:
        """Seconds by activity until now."""
        self._close()
        return dict(self._seconds)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Count time in the body for `activity`, and time after it for no particular one; start-up ends with the first step."""
        is_starting = self._activity is Activity.STARTUP and activity is not Activity.STEPS
        self._turn_to(activity)
        try:
            yield
        finally:
            self._turn_to(Activity.STARTUP if is_starting else Activity.OTHER)

    def move(self, seconds: float, source: Activity, target: Activity) -> None:
        """Move seconds from one activity to another, at most as many as it has."""
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


class GoodputRecorder:
    """Totals of time over all attempts, and the file of their records."""

    def __init__(self, path: Path, start: AttemptStarted, stopwatch: Stopwatch) -> None:
        """start: its time is that of this call, in seconds since the epoch. Raises OSError if the file cannot be opened."""
        earlier: list[GoodputRecord] = parse_records(read_lines(read_own(path).decode(errors="replace"))) if path.exists() else []
        self._attempt, self._stopwatch = start.attempt, stopwatch
        self._start = start.model_copy(update={"time": start.time - sum(stopwatch.seconds().values())})
        self._before, self._losses = goodput_totals([*earlier, self._start]), attempt_losses([*earlier, self._start])
        self._num_saves = 0
        self._lines = JsonLines(path)
        self._lines.append(self._start.model_dump(mode="json"))
        self._written_at = self._start.time

    def totals(self) -> GoodputTotals:
        """Totals until now."""
        return self._before.plus(self._stopwatch.seconds())

    def losses(self) -> AttemptLosses:
        """Losses of earlier attempts, with the time of this one."""
        return self._losses.plus(self._stopwatch.seconds(), self._num_saves)

    def saved(self) -> None:
        """Record that a checkpoint has been taken."""
        self._num_saves += 1

    def record(self, step: int, *, always: bool, is_last: bool = False) -> None:
        """Write what this attempt has spent so far; unless `always`, only when the latest record is old."""
        seconds = self._stopwatch.seconds()
        now = self._start.time + sum(seconds.values())
        if always or now - self._written_at >= LONGEST_GAP_SECONDS:
            spent = TimeSpent(
                attempt=self._attempt, time=now, step=step, seconds=seconds, num_saves=self._num_saves, is_last=is_last
            )
            self._lines.append(spent.model_dump(mode="json"))
            self._written_at = now

    def close(self, step: int) -> None:
        """Write the last record."""
        self.record(step, always=True, is_last=True)
        self._lines.close()


def process_age_seconds() -> float:
    """Time since the kernel started this process; 0 if the kernel does not report it."""
    try:
        # Field 22 of proc(5)'s stat, counted from behind the name, which may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))

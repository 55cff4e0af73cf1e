"""Files to which rank 0 appends JSON lines: the history, with a line for each optimizer step, and the goodput records.

Both cover all attempts of the job. Readers skip a line that a crash truncated.
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
"""Longest time between two records. What a killed attempt did after its last record counts as time between attempts."""


class History:
    """The history file. A crash may lose its last lines without harm, because a resumed run writes them again."""

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        """resumed_step: the step after which the run continues; None for a run that starts from scratch. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[dict[str, Any]] = []
        if path.exists() and resumed_step is not None:
            # Later steps are done again, and so is the step whose line a crash truncated.
            lines = read_lines(read_own(path).decode(errors="replace"))
            kept = [line for line in lines if isinstance(line.get("step"), int) and line["step"] <= resumed_step]
        write_durably(path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        self._lines = JsonLines(path)
        self.tokens: int = sum(line.get("tokens", 0) for line in kept)
        """Number of tokens in all steps that count, that is, in all steps of the history."""
        self.resumed: dict[str, Any] = kept[-1] if kept else {}
        """The history's line for the step after which the run continues; empty for a run that starts from scratch."""

    def append(self, **values: Any) -> None:
        """Append one line, leaving out values that are None."""
        self.tokens += values.get("tokens", 0)
        self._lines.append({name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class Stopwatch:
    """Divides the time since the start of this process among activities. At each moment, exactly one activity counts."""

    def __init__(self, age_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = {Activity.STARTUP: age_seconds}
        self._activity, self._since = Activity.STARTUP, clock()

    def seconds(self) -> dict[Activity, float]:
        """Return the seconds spent on each activity so far."""
        self._turn_to(self._activity)
        return dict(self._seconds)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Count the body's time as `activity`. Time after the body counts as startup until the first step, and then as other."""
        is_starting = self._activity is Activity.STARTUP and activity is not Activity.STEPS
        self._turn_to(activity)
        try:
            yield
        finally:
            self._turn_to(Activity.STARTUP if is_starting else Activity.OTHER)

    def move(self, seconds: float, source: Activity, target: Activity) -> None:
        """Move seconds from `source` to `target`, but no more than `source` has."""
        moved = min(seconds, self._seconds.get(source, 0.0))
        self._seconds[source] = self._seconds.get(source, 0.0) - moved
        self._seconds[target] = self._seconds.get(target, 0.0) + moved

    def _turn_to(self, activity: Activity) -> None:
        now = self._clock()
        self._seconds[self._activity] = self._seconds.get(self._activity, 0.0) + now - self._since
        self._activity, self._since = activity, now


class GoodputRecorder:
    """The totals of time over all attempts, and the file with the attempts' records."""

    def __init__(self, path: Path, start: AttemptStarted, stopwatch: Stopwatch) -> None:
        """start: a record whose time is that of this call. Raises OSError if the file cannot be opened."""
        earlier: list[GoodputRecord] = parse_records(read_lines(read_own(path).decode(errors="replace"))) if path.exists() else []
        self._attempt, self._stopwatch = start.attempt, stopwatch
        self._start = start.model_copy(update={"time": start.time - sum(stopwatch.seconds().values())})
        self._before, self._losses = goodput_totals([*earlier, self._start]), attempt_losses([*earlier, self._start])
        self._num_saves = 0
        self._lines = JsonLines(path)
        self._lines.append(self._start.model_dump(mode="json"))
        self._written_at = self._start.time

    def totals(self) -> GoodputTotals:
        """Return the totals so far."""
        return self._before.plus(self._stopwatch.seconds())

    def losses(self) -> AttemptLosses:
        """Return the losses of earlier attempts, with the time and the saves of this attempt."""
        return self._losses.plus(self._stopwatch.seconds(), self._num_saves)

    def saved(self) -> None:
        """Record that a checkpoint has been taken."""
        self._num_saves += 1

    def record(self, step: int, *, always: bool, is_last: bool = False) -> None:
        """Write the time that this attempt has spent so far; unless `always`, only if the latest record is old."""
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
    """Return the time since the kernel started this process; 0 if the kernel does not report it."""
    try:
        # This is field 22 of stat (see proc(5)), counted from the end of the name, since the name may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))

"""When a run is disturbed: at a random time, or at a random call of a function inside one of its stages."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.support.cases import table
from tests.support.forked_ranks import before_call, wrap

STAGES = {
    "train.step:optimizer_step": "step",
    "checkpoint.checkpoints:begin_save": "save",
    "checkpoint.checkpoints:commit_save": "save",
    "checkpoint.save:write_rank_file": "save",
    "train.run:held_out_loss": "evaluation",
    "train.run:export": "export",
}
STARTUP, BETWEEN = "startup", "between"
BASE = "base"
"""Before training, while a base with added tokens is written."""
ALL_STAGES = (BASE, STARTUP, "step", BETWEEN, "save", "evaluation", "export")
Hook = tuple[str, int, tuple[int | None, ...]]
"""Function, most calls, and which ranks call it (None: all of them are hit)."""
_EVERY_RANK, _FIRST = (0, 1, None), (0,)


def hooks_of(name: str, callers: tuple[int | None, ...]) -> tuple[Hook, ...]:
    """Return the functions of a table of moments.yaml, which these ranks call."""
    return tuple((function, calls, callers) for function, calls in table(__file__, name).items())


HOOKS = (*hooks_of("EVERY_RANK", _EVERY_RANK), *hooks_of("FIRST_RANK", _FIRST))


@dataclass(frozen=True)
class Moment:
    """When, whom and how; `seconds` or `function` is set."""

    number: int
    rank: int | None
    """None: all ranks, as when a node is lost."""
    landed: Path
    """Directory in which a rank that is hit says in which stage it was."""
    deadly: bool
    seconds: float | None = None
    function: str | None = None
    call: int = 1

    def arm(self, rank: int) -> None:
        """Prepare it in a rank's process."""
        stages = StageRecord()
        if self.rank in (None, rank):
            if self.seconds is not None:
                timer = threading.Timer(self.seconds, self._strike, (rank, stages))
                timer.daemon = True
                timer.start()
            elif self.function is not None:
                before_call(self.function, self.call, lambda: self._strike(rank, stages))
        # Last, so that a strike before a call counts as inside it.
        stages.watch()

    def _strike(self, rank: int, stages: StageRecord) -> None:
        (self.landed / f"{self.number}-{rank}").write_text(stages.current)
        os.kill(os.getpid(), signal.SIGKILL if self.deadly else signal.SIGTERM)

    def __str__(self) -> str:
        where = f"after {self.seconds:.2f} s" if self.seconds is not None else f"at call {self.call} of {self.function}"
        return f"{'SIGKILL' if self.deadly else 'SIGTERM'} to {'all ranks' if self.rank is None else f'rank {self.rank}'} {where}"


@dataclass(frozen=True)
class OutputTo:
    """Sends what a rank prints to a file in a directory."""

    directory: Path

    def arm(self, rank: int) -> None:
        """Do it in this process."""
        descriptor = os.open(self.directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


class StageRecord:
    """Where this process is, known to the thread that ends it."""

    def __init__(self) -> None:
        self._entered: list[str] = []
        self._has_begun = False

    def watch(self) -> None:
        """Begin to take note, in this process."""
        for function, stage in STAGES.items():
            wrap(function, self._recorded(stage))

    @property
    def current(self) -> str:
        """Stage of the call entered last, by any thread."""
        if self._entered:
            return self._entered[-1]
        return BETWEEN if self._has_begun else STARTUP

    def _recorded(self, stage: str) -> Any:
        def run(original: Any, *arguments: Any, **named: Any) -> Any:
            self._has_begun = True
            self._entered.append(stage)
            try:
                return original(*arguments, **named)
            finally:
                self._entered.remove(stage)

        return run


def random_moment(
    random: Random,
    number: int,
    landed: Path,
    *,
    deadly: bool,
    usual_seconds: float,
    hooks: Sequence[Hook] = HOOKS,
    ranks: Sequence[int | None] = _EVERY_RANK,
) -> Moment:
    """A moment of an attempt that takes about `usual_seconds`; half of them by the clock."""
    if random.random() < 0.5:
        return Moment(number, random.choice(ranks), landed, deadly, seconds=random.uniform(0, usual_seconds))
    function, most_calls, callers = random.choice(hooks)
    return Moment(number, random.choice(callers), landed, deadly, function=function, call=random.randint(1, most_calls))

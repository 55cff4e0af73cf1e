"""Which rank keeps the others waiting: plain records of ranks, and what is concluded from them. Needs no torch.

Collectives couple the ranks, so when one stops all of them stop, and their latest steps say nothing. What tells them apart is how
many collectives each has entered: a rank that waits has entered the one that the culprit has not reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.names import Role
from finetune_trainer.files import read_own

LONG_FACTOR = 4
"""How many step timeouts a rank may take until its first step is done, and for what it announces to be long."""
LONG_SECONDS_LEAST = 300.0
"""The same for short step timeouts: loading a model takes no less for them."""
START_SECONDS = 600.0
"""For the start of a rank, and for joining the others: imports on a machine that is a hundred times too busy take no longer."""
STALLED_FILE = "stalled.json"
"""In the directory of stacks: the verdict, written once by the first rank that came to it."""
JOIN = "join"
"""What a rank says that joins the others. How long it takes is counted from the moment at which all of them run."""
TURNS_IN_SILENCE = 5
_SILENCE_SECONDS = (5.0, 180.0)
"""Shortest and longest silence. NFS clients may see a new file up to a minute late, which must not look like silence."""


@dataclass(frozen=True)
class StallTimeouts:
    """How long a watchdog waits for what, in seconds; all of it follows from the plan's step timeout."""

    step: float
    long: float
    start: float
    """How long the start of a rank may take until its watchdog runs, and joining the others once all of theirs run."""
    silence: float
    """A watchdog that has written no record for so long belongs to a process that is stopped, dead or starved."""

    def allowance(self, *, is_long: bool) -> float:
        """How long a rank may go without a beat; `is_long`: what the latest beat says of what follows it."""
        return self.long if is_long else self.step

    @property
    def turn(self) -> float:
        """Between two looks of a watchdog."""
        return self.silence / TURNS_IN_SILENCE

    @property
    def collection(self) -> float:
        """How long a verdict waits for the stacks of all ranks: each takes up to a turn to see it, and writes for a moment."""
        return self.silence + 5.0

    @property
    def verdict(self) -> float:
        """The longest time from a rank's stop to the end of all ranks."""
        return self.long + 2 * self.silence + self.collection


def stall_timeouts(step_timeout_seconds: float) -> StallTimeouts:
    """What the plan's step timeout means for each wait."""
    shortest, longest = _SILENCE_SECONDS
    long = max(LONG_FACTOR * step_timeout_seconds, LONG_SECONDS_LEAST)
    return StallTimeouts(
        step=step_timeout_seconds,
        long=long,
        start=min(long, START_SECONDS),
        silence=min(max(step_timeout_seconds / 6, shortest), longest),
    )


class HeartbeatRecord(BaseModel):
    """What a watchdog says of its rank at each turn."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    rank: int
    node_rank: int
    pid: int
    """Of the rank, on its node."""
    turn: int
    """Counts the records of this rank: one that stays the same comes from a watchdog that no longer runs."""
    what: str
    step: int
    idle_seconds: float
    """Since the latest beat."""
    is_overdue: bool
    """By the rank's own allowance, which depends on what it is doing."""
    collectives: int
    """Entered so far."""
    is_in_collective: bool
    """By the main thread's innermost frames. With NCCL a rank waits elsewhere, so this only decides between equals."""
    at: str
    """Where the main thread is: innermost frame outside of libraries."""


class Stall(BaseModel):
    """The verdict."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    rank: int
    """The rank that keeps the others waiting."""
    node_rank: int | None
    step: int | None
    declared_by: int | None
    """Rank whose watchdog declared it; None: the supervisor of the rank's node did."""
    silent: list[int]
    """Ranks whose watchdogs no longer write: their stacks are not to be expected."""
    message: str
    time: float
    """Seconds since the epoch."""

    def report(self, attempt: int, stacks: str) -> TerminationReport:
        """The report in the name of the rank that stopped. `stacks`: of its threads, empty where it could not write them."""
        return TerminationReport(
            role=Role.TRAIN.value,
            attempt=attempt,
            outcome=Outcome.FAILED,
            failure=FailureClass.STALLED,
            message=self.message,
            hint=f"the stacks of all ranks that could write them are on the workspace, in stacks/train-{attempt}; "
            "raise training.stepTimeoutSeconds if the rank was only slow",
            rank=self.rank,
            node_rank=self.node_rank,
            step=self.step,
            exception=stacks,
            time=self.time,
        )

    def echo(self, rank: int, node_rank: int, attempt: int) -> TerminationReport:
        """The report of a rank that waited for the one that stopped."""
        return TerminationReport(
            role=Role.TRAIN.value,
            attempt=attempt,
            outcome=Outcome.FAILED,
            failure=FailureClass.COLLECTIVE,
            message=f"waited for rank {self.rank}, which stopped",
            rank=rank,
            node_rank=node_rank,
            step=self.step,
            time=self.time,
        )


def never_spoke(silent: list[int], node_rank: int, seconds: float, now: float) -> Stall:
    """The verdict on ranks of a node that started and gave no sign of life within so many seconds."""
    others = f", nor have ranks {', '.join(map(str, silent[1:]))}" if silent[1:] else ""
    return Stall(
        rank=silent[0],
        node_rank=node_rank,
        step=None,
        declared_by=None,
        silent=silent,
        message=f"rank {silent[0]} has given no sign of life within {seconds:.0f} s of the start of this node's ranks{others}",
        time=now,
    )


def find_stall(records: Mapping[int, HeartbeatRecord], silent: Iterable[int], declared_by: int, now: float) -> Stall | None:
    """The rank that stopped, or None where the one that the others wait for is still within its allowance.

    Args:
        records: The latest record of each rank that has written one.
        silent: Ranks whose records no longer change, or that never wrote one.
        declared_by: The rank that asks; it is overdue itself.
        now: Seconds since the epoch.
    """
    mute = sorted(silent)
    if mute:
        first = mute[0]
        last = records.get(first)
        said = f"its last sign was {last.what!r} at step {last.step}, at {last.at}" if last else "it never gave a sign"
        others = f" (as do ranks {', '.join(map(str, mute[1:]))})" if mute[1:] else ""
        return Stall(
            rank=first,
            node_rank=last.node_rank if last else None,
            # Ranks are in step with each other, and the record of the silent one may be a turn old.
            step=max((record.step for record in records.values()), default=None),
            declared_by=declared_by,
            silent=mute,
            message=f"rank {first} gives no sign of life{others}: its process is stopped, gone or starved; {said}",
            time=now,
        )
    fewest = min(record.collectives for record in records.values())
    behind = [record for record in records.values() if record.what == JOIN] or [
        record for record in records.values() if record.collectives == fewest
    ]
    if not all(record.is_overdue for record in behind):
        return None
    culprit = min(behind, key=lambda record: (record.is_in_collective, -record.idle_seconds, record.rank))
    message = (
        f"rank {culprit.rank} has finished nothing for {culprit.idle_seconds:.0f} s since {culprit.what!r} at step "
        f"{culprit.step}; it is at {culprit.at}"
    )
    if len(behind) == len(records) > 1 and all(record.is_in_collective for record in behind):
        message += "; all ranks wait in the same collective, so the network between them may be at fault"
    return Stall(
        rank=culprit.rank,
        node_rank=culprit.node_rank,
        step=culprit.step,
        declared_by=declared_by,
        silent=[],
        message=message,
        time=now,
    )


def heartbeat_file_name(rank: int) -> str:
    """File name of a rank's record, removed when the rank ends in order."""
    return f"heartbeat-{rank:05d}.json"


def stacks_name(rank: int) -> str:
    """File name of a rank's stacks."""
    return f"rank-{rank:05d}.txt"


def flight_recorder_name(rank: int) -> str:
    """File name of what the collective library recorded of a rank."""
    return f"collectives-{rank:05d}.json"


def remove_traces(directory: Path, ranks: Iterable[int]) -> None:
    """Remove what an earlier run of the same attempt left about these ranks."""
    for rank in ranks:
        for name in (heartbeat_file_name(rank), stacks_name(rank), flight_recorder_name(rank)):
            (directory / name).unlink(missing_ok=True)
    (directory / STALLED_FILE).unlink(missing_ok=True)


def read_stall(directory: Path) -> Stall | None:
    """The verdict, None while there is none."""
    try:
        return Stall.model_validate_json(read_own(directory / STALLED_FILE))
    except (OSError, ValidationError):
        return None


def read_heartbeat(path: Path) -> HeartbeatRecord | None:
    """A rank's record, None where there is none."""
    try:
        return HeartbeatRecord.model_validate_json(read_own(path))
    except (OSError, ValidationError):
        return None


class SilenceDetector:
    """Notices which watchdogs have gone silent, by its own clock, so that no clocks have to agree."""

    def __init__(self, world_size: int, silence: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._world_size, self._silence, self._clock = world_size, silence, clock
        self._heard: dict[int, _LastTurn] = {}

    def silent(self, records: Mapping[int, HeartbeatRecord]) -> list[int] | None:
        """Ranks that wrote nothing for the length of a silence; None while that cannot be said of each rank yet."""
        now = self._clock()
        for rank in range(self._world_size):
            turn = records[rank].turn if rank in records else None
            known = self._heard.get(rank)
            if known is None:
                self._heard[rank] = _LastTurn(turn, now, is_alive=False)
            elif known.turn != turn:
                self._heard[rank] = _LastTurn(turn, now, is_alive=True)
        quiet = {rank for rank, heard in self._heard.items() if now - heard.since >= self._silence}
        if any(not heard.is_alive and rank not in quiet for rank, heard in self._heard.items()):
            return None
        return sorted(quiet)


@dataclass(frozen=True)
class _LastTurn:
    turn: int | None
    since: float
    is_alive: bool
    """It has written since this detector began."""

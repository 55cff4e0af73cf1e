"""Finds the rank that keeps the others waiting, using only records that ranks write. Does not import torch.

Collectives couple the ranks, so when one rank stops, all stop at the same step. What differs is the number of collectives that
each has entered: a waiting rank has entered the collective that the culprit has not reached.
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
"""A rank may take this many step timeouts for its first step, and for an activity that it announces as long."""
LONG_SECONDS_LEAST = 300.0
"""Minimum time allowed for a long activity, because a short step timeout does not make a model load faster."""
START_SECONDS = 600.0
"""Maximum time for a rank's start, and for joining the others. Imports take less time, even on a machine that is overloaded a
hundredfold.
"""
STALLED_FILE = "stalled.json"
"""Name of the verdict's file in the directory of stacks. It is written once, by the first rank that reaches a verdict."""
JOIN = "join"
"""Activity of a rank that joins the others. Its timeout starts once all ranks are running."""
TURNS_IN_SILENCE = 5
_SILENCE_SECONDS = (5.0, 180.0)
"""Bounds of `silence`. The upper bound exceeds a minute, because an NFS client may see a new file that late."""


@dataclass(frozen=True)
class StallTimeouts:
    """Timeouts of a watchdog in seconds, all derived from the plan's step timeout."""

    step: float
    long: float
    start: float
    """Time that a rank may take to start its watchdog, and again to join the others once all watchdogs are running."""
    silence: float
    """Time after which a watchdog that writes no record counts as silent: its process is stopped, dead or starved."""

    def allowance(self, *, is_long: bool) -> float:
        """Return how long a rank may go without a beat. is_long: whether the latest beat announced a long activity."""
        return self.long if is_long else self.step

    @property
    def turn(self) -> float:
        """Time between two turns of a watchdog."""
        return self.silence / TURNS_IN_SILENCE

    @property
    def collection(self) -> float:
        """Time to wait after a verdict for all ranks' stacks: a rank sees the verdict within a turn, then writes them."""
        return self.silence + 5.0

    @property
    def verdict(self) -> float:
        """The longest time between the moment a rank stops making progress and the end of all ranks."""
        return self.long + 2 * self.silence + self.collection


def stall_timeouts(step_timeout_seconds: float) -> StallTimeouts:
    """Derive all timeouts from the plan's step timeout."""
    shortest, longest = _SILENCE_SECONDS
    long = max(LONG_FACTOR * step_timeout_seconds, LONG_SECONDS_LEAST)
    return StallTimeouts(
        step=step_timeout_seconds,
        long=long,
        start=min(long, START_SECONDS),
        silence=min(max(step_timeout_seconds / 6, shortest), longest),
    )


class HeartbeatRecord(BaseModel):
    """A watchdog's record of its rank, written at each turn."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    rank: int
    node_rank: int
    pid: int
    """Process id of the rank on its node."""
    turn: int
    """Number of the record. If the number stays the same, the watchdog is no longer running."""
    what: str
    step: int
    idle_seconds: float
    """Time since the latest beat."""
    is_overdue: bool
    """Whether the rank has exceeded the time allowed for its activity."""
    collectives: int
    """Number of collectives that the rank has entered so far."""
    is_in_collective: bool
    """Whether the main thread's innermost frames show a collective. With NCCL a rank waits elsewhere; this only breaks ties."""
    at: str
    """Location of the main thread: its innermost frame outside of libraries."""


class Stall(BaseModel):
    """The verdict about a stalled gang."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    rank: int
    """The rank that keeps the others waiting."""
    node_rank: int | None
    step: int | None
    """Optimizer step at which the gang stalled; None: the ranks had not joined yet."""
    declared_by: int | None
    """Rank whose watchdog declared the stall; None: the supervisor of the culprit's node declared it."""
    silent: list[int]
    """Ranks whose watchdogs no longer write, so no stacks are expected from them."""
    message: str
    time: float
    """Seconds since the epoch."""

    def report(self, attempt: int, stacks: str) -> TerminationReport:
        """Make the report for the rank that stopped. stacks: the stacks of its threads; empty if it could not write them."""
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
        """Make the report of a rank that waited for the rank that stopped."""
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
    """Return the verdict on a node's ranks that gave no sign of life within `seconds` of their start."""
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
    """Find the rank that stopped; None if the rank that the others wait for still has time left.

    records: the latest record of each rank that has written one. silent: ranks whose records no longer change, or that never
    wrote a record. declared_by: the rank that calls this, which is overdue itself. now: seconds since the epoch.
    """
    silent_ranks = sorted(silent)
    if silent_ranks:
        first = silent_ranks[0]
        last_record = records.get(first)
        last_sign = (
            f"its last sign was {last_record.what!r} at step {last_record.step}, at {last_record.at}"
            if last_record
            else "it never gave a sign"
        )
        others = f" (nor do ranks {', '.join(map(str, silent_ranks[1:]))})" if silent_ranks[1:] else ""
        return Stall(
            rank=first,
            node_rank=last_record.node_rank if last_record else None,
            # All ranks are at the same step, but the silent rank's own record may be a turn old, so take the latest step.
            step=max((record.step for record in records.values()), default=None),
            declared_by=declared_by,
            silent=silent_ranks,
            message=f"rank {first} gives no sign of life{others}: its process is stopped, gone or starved; {last_sign}",
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
        step=None if culprit.what == JOIN else culprit.step,
        declared_by=declared_by,
        silent=[],
        message=message,
        time=now,
    )


def heartbeat_file_name(rank: int) -> str:
    """File name of a rank's record. The rank removes the file when it ends normally."""
    return f"heartbeat-{rank:05d}.json"


def stacks_name(rank: int) -> str:
    """File name of a rank's stacks."""
    return f"rank-{rank:05d}.txt"


def flight_recorder_name(rank: int) -> str:
    """File name of the collective library's records for a rank."""
    return f"collectives-{rank:05d}.json"


def remove_traces(directory: Path, ranks: Iterable[int]) -> None:
    """Remove the verdict and these ranks' traces that an earlier run of the same attempt left behind."""
    for rank in ranks:
        for name in (heartbeat_file_name(rank), stacks_name(rank), flight_recorder_name(rank)):
            (directory / name).unlink(missing_ok=True)
    (directory / STALLED_FILE).unlink(missing_ok=True)


def read_stall(directory: Path) -> Stall | None:
    """Read the verdict; None if none can be read yet."""
    try:
        return Stall.model_validate_json(read_own(directory / STALLED_FILE))
    except (OSError, ValidationError):
        return None


def read_heartbeat(path: Path) -> HeartbeatRecord | None:
    """Read a rank's record; None if none can be read."""
    try:
        return HeartbeatRecord.model_validate_json(read_own(path))
    except (OSError, ValidationError):
        return None


class SilenceDetector:
    """Detects watchdogs that have gone silent. It uses only its own clock, so the clocks of nodes need not agree."""

    def __init__(self, world_size: int, silence: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._world_size, self._silence, self._clock = world_size, silence, clock
        self._heard: dict[int, _LastTurn] = {}

    def silent(self, records: Mapping[int, HeartbeatRecord]) -> list[int] | None:
        """Return the ranks that have written nothing for `silence` seconds; None if it is too early to judge every rank."""
        now = self._clock()
        for rank in range(self._world_size):
            turn = records[rank].turn if rank in records else None
            last_turn = self._heard.get(rank)
            if last_turn is None:
                self._heard[rank] = _LastTurn(turn, now, is_alive=False)
            elif last_turn.turn != turn:
                self._heard[rank] = _LastTurn(turn, now, is_alive=True)
        quiet = {rank for rank, last_turn in self._heard.items() if now - last_turn.since >= self._silence}
        if any(not last_turn.is_alive and rank not in quiet for rank, last_turn in self._heard.items()):
            return None
        return sorted(quiet)


@dataclass(frozen=True)
class _LastTurn:
    turn: int | None
    since: float
    is_alive: bool
    """Whether the watchdog has written a record since this detector started."""

"""The supervisor's guard of its node's ranks: it kills ranks that never give a sign of life, that stall, or that do not end.

A rank's own watchdog (ranks/watchdog.py) knows more, but cannot watch a rank that never starts it, or that is still running after
it has reported its end. torchrun's agent considers a process that merely waits healthy.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from finetune_job.names import Role
from finetune_trainer.context import RunContext
from finetune_trainer.processes.child import Child
from finetune_trainer.processes.start import name_of_process
from finetune_trainer.ranks.reports import rank_process_name, rank_report_name, write_rank_report
from finetune_trainer.ranks.stalls import (
    STALLED_FILE,
    Stall,
    StallTimeouts,
    heartbeat_file_name,
    never_spoke,
    read_heartbeat,
    read_stall,
    stall_timeouts,
)
from finetune_trainer.ranks.start_signs import read_started, start_stacks

log = logging.getLogger(__name__)
END_SECONDS = 120.0
"""Time that a rank may run after it has reported its end. A rank whose collective failed waits for 15 s of this time."""
AGENT_END_SECONDS = 420.0
"""Time that torchrun's agent may run after its last rank has ended. It waits 300 s for the agents of other nodes."""
LOOK_SECONDS = 0.5
_STACKS_SECONDS = 2.0
"""Time that a rank may take to write its stacks after the signal that requests them."""


@dataclass
class LocalRanks:
    """Signs of life of this node's ranks, each with the time on the monotonic clock at which it was first seen."""

    started: dict[int, float] = field(default_factory=dict)
    spoken: dict[int, float] = field(default_factory=dict)
    """Ranks whose watchdog runs, or that have reported their end."""
    reported: dict[int, float] = field(default_factory=dict)

    def see(self, started: Collection[int], spoken: Collection[int], reported: Collection[int], now: float) -> None:
        """Record signs of life that are new."""
        for known, ranks in ((self.started, started), (self.spoken, {*spoken, *reported}), (self.reported, reported)):
            for rank in ranks:
                known.setdefault(rank, now)

    def silent(self, ranks: Collection[int], seconds: float, now: float) -> list[int]:
        """Return the ranks that are still silent `seconds` after the first rank's start; torchrun starts all ranks at once."""
        if not self.started or now - min(self.started.values()) < seconds:
            return []
        return sorted(set(ranks) - self.spoken.keys())

    def endless(self, seconds: float, now: float) -> list[int]:
        """Return the ranks that reported their end at least `seconds` ago."""
        return sorted(rank for rank, since in self.reported.items() if now - since >= seconds)


class RankGuard:
    """A thread that watches this node's ranks from `begin` to `end`."""

    def __init__(self, context: RunContext, ranks: range, node_rank: int, pipes: Path, agent: Child) -> None:
        """ranks: the global ranks of this node. pipes: directory in which the ranks leave signs of their start."""
        self._context, self._ranks, self._node_rank, self._pipes, self._agent = context, ranks, node_rank, pipes, agent
        self._stacks = context.workspace.stacks(context.attempt)
        self._reports = context.workspace.reports(Role.TRAIN.value, context.attempt)
        self._timeouts: StallTimeouts = stall_timeouts(context.plan.training.step_timeout_seconds)
        self._seen = LocalRanks()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank guard", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Stop watching once the agent has ended."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            try:
                if self._look():
                    return
            except OSError:
                # The workspace may be absent only for a while, so keep looking.
                log.exception("the guard of this node's ranks could not look at them")

    def _look(self) -> bool:
        """Act on new signs. Returns True when the guard has nothing left to do."""
        now = time.monotonic()
        if (stall := read_stall(self._stacks)) is not None:
            self._end_after_verdict(stall)
            return True
        started = read_started(self._pipes, self._ranks)
        self._seen.see(
            started,
            [rank for rank in self._ranks if (self._stacks / heartbeat_file_name(rank)).exists()],
            [rank for rank in self._ranks if (self._reports / rank_report_name(rank)).exists()],
            now,
        )
        silent = self._seen.silent(self._ranks, self._timeouts.start, now)
        if silent:
            self._declare(silent, started)
        for rank in self._seen.endless(END_SECONDS, now):
            self._kill(rank, started.get(rank), "has reported how it ended and is still running")
        if self._seen.reported.keys() >= set(self._ranks) and max(self._seen.reported.values()) + AGENT_END_SECONDS <= now:
            log.error("torchrun did not exit after its ranks: killing it")
            self._agent.send_signal(signal.SIGKILL)
            return True
        return False

    def _declare(self, silent: list[int], started: Mapping[int, int]) -> None:
        """Write the verdict that these ranks never gave a sign of life, with the stacks of those that can still write them."""
        texts = [f"rank {rank}:\n{stacks}" for rank in silent if (stacks := self._stacks_of(rank, started.get(rank)))]
        stall = never_spoke(silent, self._node_rank, self._timeouts.start, time.time())
        log.error("%s", stall.message)
        self._stacks.mkdir(parents=True, exist_ok=True)
        write_rank_report(self._reports, stall.report(self._context.attempt, "\n".join(texts)))
        with suppress(FileExistsError), (self._stacks / STALLED_FILE).open("x") as file:
            file.write(stall.model_dump_json(indent=2))

    def _stacks_of(self, rank: int, pid: int | None) -> str:
        if pid is None or not self._is_rank(pid, rank):
            return "its process was not started, or has ended"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        self._ended.wait(_STACKS_SECONDS)
        return start_stacks(self._pipes, rank - self._ranks.start)

    def _end_after_verdict(self, stall: Stall) -> None:
        """Kill the silent ranks of this node, and the agent if that was not enough.

        The agent considers a stopped process healthy, and would wait the full time for saving, although the process cannot save.
        """
        reported = self._reports / rank_report_name(stall.rank)
        deadline = time.monotonic() + self._timeouts.collection + self._timeouts.silence
        while not reported.exists() and time.monotonic() < deadline:
            if self._ended.wait(LOOK_SECONDS):
                return
        started = read_started(self._pipes, self._ranks)
        for rank in set(stall.silent) & set(self._ranks):
            record = read_heartbeat(self._stacks / heartbeat_file_name(rank))
            self._kill(rank, record.pid if record is not None else started.get(rank), "gives no sign of life")
        if not self._ended.wait(self._timeouts.silence + self._timeouts.collection):
            log.error("ranks of this node did not end after a stall: ending them")
            self._agent.send_signal(signal.SIGTERM)

    def _kill(self, rank: int, pid: int | None, why: str) -> None:
        if pid is not None and self._is_rank(pid, rank):
            log.error("killing rank %d, which %s", rank, why)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_rank(self, pid: int, rank: int) -> bool:
        return name_of_process(pid) == rank_process_name(rank)

"""Runs torchrun on this node: gives it arguments, copies its output, and forwards signals to it.

torchrun's agent is a separate program (roles/agent.py), and ranks are forked from a process with a single thread.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from finetune_job.names import SHUTDOWN_SECONDS, Role
from finetune_trainer.context import RunContext
from finetune_trainer.processes.child import ChildOutput, start
from finetune_trainer.processes.start import may_need_bitsandbytes, name_of_process
from finetune_trainer.ranks.logs import CappedFile, RankLogs, show
from finetune_trainer.ranks.reports import rank_process_name
from finetune_trainer.ranks.start_signs import read_started, remove_start_signs
from finetune_trainer.roles.rank_guard import LOOK_SECONDS, RankGuard

OUTPUT_TAIL_BYTES = 1 << 18
"""Number of bytes at the end of torchrun's own output that are kept in memory, to read the summary there."""
ANSWERS_BYTES = 4096
"""Maximum number of bytes of the agent's answers that may wait to be read; an answer has two."""
AGENT_STOP_SECONDS = SHUTDOWN_SECONDS + 15.0
"""Time that the agent may take to end after SIGTERM; its ranks save for at most `SHUTDOWN_SECONDS`."""
ENDING_LOOK_SECONDS = 0.05
"""Time between two checks whether ranks have ended."""
LOOPBACK = "127.0.0.1"
RANK_SCRIPT = Path(__file__).parents[1] / "train" / "__main__.py"
PRELOADED, PRELOADED_TO_PACK = "finetune_trainer.train.preloaded", "torch,transformers"
"""Modules that the fork server of the ranks imports: for most plans, and for those that may quantize their base."""


@dataclass(frozen=True)
class Launch:
    """This node's part in the gang."""

    plan_path: Path
    node_rank: int
    master_address: str
    master_port: int
    observe_port: int
    ranks: int | None = None
    """Number of ranks if this node is the whole gang, which needs an ordered reduction; None: the plan's number."""
    nodes: int | None = None
    """Number of nodes in this attempt if it differs from the plan's, which needs an ordered reduction; None: the plan's."""
    restarts: int = 0
    """Maximum number of times that the ranks are started again here if only their processes failed."""


def torchrun_arguments(context: RunContext, launch: Launch, pipes: Path) -> list[str]:
    """Return the arguments of torchrun on this node."""
    nodes = (launch.nodes or context.plan.parallelism.nodes) if launch.ranks is None else 1
    agent = {
        "--nnodes": nodes,
        "--nproc-per-node": len(local_ranks(context, launch)),
        "--node-rank": launch.node_rank,
        "--master-addr": LOOPBACK if nodes == 1 else launch.master_address,
        "--master-port": launch.master_port,
        "--max-restarts": 0,
        "--shutdown-timeout": SHUTDOWN_SECONDS,
        "--start-method": "forkserver",
        # Otherwise torchrun leaves a directory in the system's directory for temporary files.
        "--log-dir": pipes / "torchrun",
    }
    rank = {
        "--plan": launch.plan_path,
        "--plan-sha256": context.plan_sha256,
        "--claims-root": context.claims_root,
        "--attempt": context.attempt,
        "--node-rank": launch.node_rank,
        "--observe-port": launch.observe_port,
        "--output-pipes": pipes,
        **({} if context.until_step is None else {"--until-step": context.until_step}),
    }
    return [
        *(str(part) for pair in agent.items() for part in pair),
        "--run-path",
        str(RANK_SCRIPT),
        *(str(part) for pair in rank.items() for part in pair),
    ]


def local_ranks(context: RunContext, launch: Launch) -> range:
    """Return the global ranks on this node, by local rank."""
    num_ranks = launch.ranks or context.plan.parallelism.processes_per_node
    return range(launch.node_rank * num_ranks, (launch.node_rank + 1) * num_ranks)


class Torchrun:
    """torchrun's agent and the output of this node's ranks, from `__enter__` to `__exit__`."""

    def __init__(self, context: RunContext, launch: Launch, stopped: threading.Event) -> None:
        """stopped: set when SIGTERM arrives. The signal is passed on to the agent."""
        self._context, self._launch, self._stopped = context, launch, stopped
        self._ranks = local_ranks(context, launch)
        self._logs = context.workspace.logs(Role.TRAIN.value, context.attempt)
        self._rank_logs = RankLogs(self._logs, self._ranks)
        self._num_runs = 0
        self._deadline = math.inf
        """Time on the monotonic clock at which the agent is killed."""

    def __enter__(self) -> Self:
        order_reading, self._orders = os.pipe()
        answer_reading, answer_writing = os.pipe()
        output_reading, output_writing = os.pipe()
        os.set_blocking(output_reading, False)
        self._output = output_reading
        command = [sys.executable, "-m", "finetune_trainer.roles.agent", "--parent", str(os.getpid())]
        command += ["--preload", PRELOADED_TO_PACK if may_need_bitsandbytes(self._context.plan) else PRELOADED]
        command += ["--scratch", str(self._rank_logs.pipes)]
        command += ["--orders", str(order_reading), "--answers", str(answer_writing)]
        self._agent = start(
            command,
            os.environ,
            stdout=output_writing,
            stderr=output_writing,
            pass_fds=(order_reading, answer_writing),
            output=ChildOutput(answer_reading, ANSWERS_BYTES),
        )
        for descriptor in (order_reading, answer_writing, output_writing):
            os.close(descriptor)
        self._rank_logs.__enter__()

        def forward(_number: int, _frame: FrameType | None) -> None:
            self._stopped.set()
            # Sent once: a second signal would kill the agent while its ranks are still saving.
            if self._deadline == math.inf:
                self._deadline = time.monotonic() + AGENT_STOP_SECONDS
                self._agent.send_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, forward)
        if self._stopped.is_set():
            forward(signal.SIGTERM, None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # SIGTERM stays handled, so that another one cannot end this process before its report is written.
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._stopped.set())
        self._agent.__exit__(kind, error, trace)
        # The kernel kills ranks whose agent was killed, but a rank that waits for a slow disk ends later and may still write
        # until then. The next attempt may start as soon as this process ends, so wait for all ranks.
        while self._has_running_ranks():
            time.sleep(ENDING_LOOK_SECONDS)
        self._rank_logs.__exit__(kind, error, trace)
        for descriptor in (self._orders, self._output):
            os.close(descriptor)

    @property
    def can_run_again(self) -> bool:
        """Whether the agent has answered and none of its ranks is running, so no other process writes for this attempt."""
        return self._agent.wait(0) is None and not self._has_running_ranks()

    def _has_running_ranks(self) -> bool:
        started = read_started(self._rank_logs.pipes, self._ranks)
        return any(name_of_process(pid) == rank_process_name(rank) for rank, pid in started.items())

    def run(self) -> tuple[int, str]:
        """Start the ranks and wait for their end; returns torchrun's exit status and the end of its output."""
        launch = self._launch
        if self._num_runs:
            # The store of the previous run may still listen on its port, so this run gets another.
            with socket.socket() as probe:
                probe.bind((LOOPBACK, 0))
                launch = replace(launch, master_port=int(probe.getsockname()[1]))
        self._num_runs += 1
        remove_start_signs(self._rank_logs.pipes, len(self._ranks))
        order = json.dumps(torchrun_arguments(self._context, launch, self._rank_logs.pipes))
        with suppress(BrokenPipeError):  # the agent has ended; its status will show that
            os.write(self._orders, f"{order}\n".encode())
        guard = RankGuard(self._context, self._ranks, self._launch.node_rank, self._rank_logs.pipes, self._agent)
        guard.begin()
        try:
            return self._wait()
        finally:
            guard.end()

    def _wait(self) -> tuple[int, str]:
        log = _OutputLog(self._logs / f"torchrun-{self._launch.node_rank}.log")
        with log:
            while True:
                # This kills an agent that missed the signal, or that waits for ranks that did not get it.
                end = self._agent.look(self._deadline)
                # The agent answers after all output of a run, so output that is read after the answer is complete.
                line = self._agent.output.take_line() if end is None and self._agent.output is not None else None
                is_open = log.copy(self._output)
                if line is not None:
                    return int(line), log.tail
                if end is not None:
                    return end.code, log.tail
                wait([*self._agent.descriptors(), *([self._output] if is_open else [])], LOOK_SECONDS)


class _OutputLog:
    """The log of torchrun's own output, whose end is also kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail, self._rest = path, b"", b""
        self._file: CappedFile | None = None

    @property
    def tail(self) -> str:
        """The end of the output."""
        return self._tail.decode(errors="replace")

    def copy(self, descriptor: int) -> bool:
        """Copy what can be read without waiting; returns whether more can follow."""
        while True:
            try:
                block = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not block:
                return False
            self._tail = (self._tail + block)[-OUTPUT_TAIL_BYTES:]
            *lines, self._rest = (self._rest + block).split(b"\n")
            show("torchrun", lines)
            # If the claim is full, keep reading: the agent would block on a pipe that is not read.
            with suppress(OSError):
                self._file = self._file or CappedFile(self._path)
                self._file.write(block)

    def __enter__(self) -> Self:
        # Open the log now, so that an agent without output leaves an empty file instead of none.
        with suppress(OSError):
            self._file = CappedFile(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        show("torchrun", [self._rest] if self._rest else [])
        if self._file is not None:
            self._file.close()

"""torchrun on this node: its arguments, its output, and the signals it gets.

torchrun's agent is a program of its own (roles/agent.py), and ranks are forks of a process that has a single thread.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from finetune_job.names import SHUTDOWN_SECONDS, Role
from finetune_trainer.context import RunContext
from finetune_trainer.processes.child import start
from finetune_trainer.processes.start import may_need_bitsandbytes
from finetune_trainer.ranks.logs import CappedFile, RankLogs, show
from finetune_trainer.roles.rank_guard import RankGuard

log = logging.getLogger(__name__)
OUTPUT_TAIL_BYTES = 1 << 18
"""Bytes of torchrun's own output that are kept in memory, to read its summary."""
LOOPBACK = "127.0.0.1"
RANK_SCRIPT = Path(__file__).parents[1] / "train" / "__main__.py"
PRELOADED, PRELOADED_TO_PACK = "finetune_trainer.train.preloaded", "torch,transformers"
"""Modules of the process from which ranks are forked: for most plans, and for those that may quantize their base."""


@dataclass(frozen=True)
class Launch:
    """This node's part in the gang."""

    plan_path: Path
    node_rank: int
    master_address: str
    master_port: int
    observe_port: int
    ranks: int | None = None
    """Number of ranks on this node, which is then the whole gang. Needs an ordered reduction; None: as the plan says."""
    nodes: int | None = None
    """Number of nodes in this attempt. Needs an ordered reduction; None: as the plan says."""
    attempt_file: Path | None = None
    """File that names this attempt once it may begin; None: it may begin at once."""


def torchrun_arguments(context: RunContext, launch: Launch, pipes: Path) -> list[str]:
    """The arguments of this node's agent."""
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
    """Global ranks on this node, by local rank."""
    num_ranks = launch.ranks or context.plan.parallelism.processes_per_node
    return range(launch.node_rank * num_ranks, (launch.node_rank + 1) * num_ranks)


def run_torchrun(context: RunContext, launch: Launch, stopped: threading.Event) -> tuple[int, str]:
    """Run the agent to its end; returns its exit status and the end of its output."""
    logs = context.workspace.logs(Role.TRAIN.value, context.attempt)
    rank_logs = RankLogs(logs, local_ranks(context, launch))
    command = [sys.executable, "-m", "finetune_trainer.roles.agent", "--parent", str(os.getpid())]
    command += ["--preload", PRELOADED_TO_PACK if may_need_bitsandbytes(context.plan) else PRELOADED]
    command += ["--scratch", str(rank_logs.pipes)]
    command += torchrun_arguments(context, launch, rank_logs.pipes)
    reading, writing = os.pipe()
    agent = start(command, os.environ, stdout=writing, stderr=writing)
    os.close(writing)
    is_signalled = False

    def forward(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_signalled
        stopped.set()
        # Sent once: a second signal would end the agent while its ranks still save.
        if not is_signalled:
            is_signalled = True
            agent.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, forward)
    if stopped.is_set():
        forward(signal.SIGTERM, None)
    with agent, rank_logs, os.fdopen(reading, "rb") as output_pipe:
        guard = RankGuard(context, local_ranks(context, launch), launch.node_rank, rank_logs.pipes, agent)
        guard.begin()
        try:
            output = _read_output(output_pipe, logs / f"torchrun-{launch.node_rank}.log")
            return agent.join(), output
        finally:
            guard.end()


def _read_output(output_pipe: BinaryIO, path: Path) -> str:
    tail = b""
    kept: CappedFile | None = None
    with suppress(OSError):
        # An agent without output leaves an empty file, so that its log is never missing.
        kept = CappedFile(path)
    for line in output_pipe:
        tail = (tail + line)[-OUTPUT_TAIL_BYTES:]
        show("torchrun", [line.rstrip(b"\n")])
        try:
            kept = kept or CappedFile(path)
            kept.write(line)
        except OSError:
            # A full claim must not stop the agent, which would block on a pipe without a reader.
            continue
    if kept is not None:
        kept.close()
    return tail.decode(errors="replace")

"""torchrun on this node, as a fork: its arguments, its output, the signals it gets, and its end after a stall.

torchrun's agent is a fork of the supervisor, and the ranks are forks of the agent. Neither computes or touches a device before it
forks.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from finetune_job.names import SHUTDOWN_SECONDS, Role
from finetune_trainer.context import RunContext
from finetune_trainer.processes.child import Child, encode_answer, fork, fork_answering, wait_for_answer
from finetune_trainer.processes.devices import hide_devices
from finetune_trainer.processes.start import name_of_process, send_output_to
from finetune_trainer.ranks.logs import CappedFile, RankLogs, show
from finetune_trainer.ranks.reports import rank_process_name, rank_report_name
from finetune_trainer.ranks.stalls import heartbeat_file_name, read_heartbeat, read_stall, stall_timeouts

log = logging.getLogger(__name__)
OUTPUT_TAIL_BYTES = 1 << 18
"""How much of torchrun's own output is kept in memory, to read its summary."""
_OWN_SIGNALS = (signal.SIGTERM,)
"""Which this process handles, and its forks otherwise."""
_FORK = "fork"
_ANSWER_BYTES, _ANSWER_SECONDS = 64, 30.0
"""Of a fork that says whether it could use the device."""
LOOPBACK = "127.0.0.1"
RANK_SCRIPT = Path(__file__).parents[1] / "train" / "__main__.py"


@dataclass(frozen=True)
class Launch:
    """How this node takes part."""

    plan_path: Path
    node_rank: int
    master_address: str
    master_port: int
    observe_port: int
    ranks: int | None = None
    """On this node alone, which is then all of the gang. For plans with an ordered reduction; None: as the plan says."""
    nodes: int | None = None
    """Of this attempt. For plans with an ordered reduction; None: as the plan says."""
    attempt_file: Path | None = None
    """That names this attempt once it may begin; None: it may."""


def start_method_of_ranks() -> str:
    """`fork`, or `spawn` where an import has touched the device: a fork could not use it then."""
    import torch

    child = fork_answering(lambda: encode_answer(torch.cuda._is_in_bad_fork()), _ANSWER_BYTES)  # noqa: SLF001 - there is no public way to ask
    if wait_for_answer(child, _ANSWER_SECONDS).answer == encode_answer(False):
        return _FORK
    log.warning("an import has touched the accelerator: ranks are not forked, and each imports the libraries again")
    return "spawn"


def torchrun_arguments(context: RunContext, launch: Launch, pipes: Path, start_method: str) -> list[str]:
    """Of this node's agent."""
    nodes = (launch.nodes or context.plan.parallelism.nodes) if launch.ranks is None else 1
    agent = {
        "--nnodes": nodes,
        "--nproc-per-node": len(local_ranks(context, launch)),
        "--node-rank": launch.node_rank,
        "--master-addr": LOOPBACK if nodes == 1 else launch.master_address,
        "--master-port": launch.master_port,
        "--max-restarts": 0,
        "--shutdown-timeout": SHUTDOWN_SECONDS,
        "--start-method": start_method,
        # Else it makes one in the system's directory for temporary files and leaves it there.
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
    """The agent's exit status and the end of what it said."""
    logs = context.workspace.logs(Role.TRAIN.value, context.attempt)
    ended = threading.Event()
    rank_logs = RankLogs(logs, local_ranks(context, launch))
    start_method = start_method_of_ranks()
    arguments = torchrun_arguments(context, launch, rank_logs.pipes, start_method)
    reading, writing = os.pipe()
    # A signal meanwhile is the parent's, which then tells the agent. The agent is forked before there are threads.
    signal.pthread_sigmask(signal.SIG_BLOCK, _OWN_SIGNALS)
    agent = fork(lambda: _be_agent(arguments, writing, start_method))
    os.close(writing)
    is_told = False

    def forward(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_told
        stopped.set()
        # Once: a second signal would end the agent while its ranks still save.
        if not is_told:
            is_told = True
            agent.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_SIGNALS)
    if stopped.is_set():
        forward(signal.SIGTERM, None)
    with agent, rank_logs, os.fdopen(reading, "rb") as said:
        guard = threading.Thread(
            target=end_after_verdict, args=(context, local_ranks(context, launch), agent, ended), daemon=True
        )
        guard.start()
        try:
            output = _read_output(said, logs / f"torchrun-{launch.node_rank}.log")
            return agent.join(), output
        finally:
            ended.set()
            guard.join()


def _be_agent(arguments: list[str], output: int, start_method: str) -> None:
    """torchrun, in a fork. output: descriptor for what it says. Raises ChildFailedError, whose text names the failed ranks."""
    if start_method == _FORK:
        hide_devices()
    for number in _OWN_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_SIGNALS)
    send_output_to(output)
    from torch.distributed import run

    run.main(arguments)


def end_after_verdict(context: RunContext, ranks: range, agent: Child, ended: threading.Event) -> None:
    """After the verdict of a stall, end the silent ranks of this node, and the agent if that was not enough.

    An agent sees nothing wrong with a process that is only stopped, and gives it all the time for saving that it cannot use.
    """
    directory = context.workspace.stacks(context.attempt)
    allowed = stall_timeouts(context.plan.training.step_timeout_seconds)
    while (stall := read_stall(directory)) is None:
        if ended.wait(allowed.turn):
            return
    reported = context.workspace.reports(Role.TRAIN.value, context.attempt) / rank_report_name(stall.rank)
    deadline = time.monotonic() + allowed.collection + allowed.silence
    while not reported.exists() and time.monotonic() < deadline:
        if ended.wait(1.0):
            return
    for rank in set(stall.silent) & set(ranks):
        record = read_heartbeat(directory / heartbeat_file_name(rank))
        if record is not None and name_of_process(record.pid) == rank_process_name(rank):
            log.error("killing rank %d, which gives no sign of life", rank)
            os.kill(record.pid, signal.SIGKILL)
    if not ended.wait(allowed.silence + allowed.collection):
        log.error("ranks of this node did not end after a stall: ending them")
        agent.send_signal(signal.SIGTERM)


def _read_output(said: BinaryIO, path: Path) -> str:
    tail = b""
    kept: CappedFile | None = None
    with suppress(OSError):
        # An agent that says nothing leaves an empty file, so that nobody looks for a missing one.
        kept = CappedFile(path)
    for line in said:
        tail = (tail + line)[-OUTPUT_TAIL_BYTES:]
        show("torchrun", [line.rstrip(b"\n")])
        try:
            kept = kept or CappedFile(path)
            kept.write(line)
        except OSError:
            # A full claim must not stop the agent, which would block on a pipe that nobody reads.
            continue
    if kept is not None:
        kept.close()
    return tail.decode(errors="replace")

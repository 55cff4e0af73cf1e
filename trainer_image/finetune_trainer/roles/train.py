"""The `train` role in each pod: wait for the master's name, run torchrun, pass SIGTERM on, report the root cause.

The rendezvous is static, so torchrun never restarts ranks; a gang is restarted as a whole by the operator. This process imports
the libraries once; torchrun's agent is a fork of it, and the ranks are forks of the agent. Neither computes or touches a device
before it forks.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from finetune_job.api.training import GradientReduction
from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.names import SHUTDOWN_SECONDS, Role
from finetune_trainer.context import RunContext
from finetune_trainer.errors import ConfigError
from finetune_trainer.files import read_own
from finetune_trainer.inspection.special_files import require_links_inside
from finetune_trainer.processes.child import Child, encode_answer, fork, fork_answering, wait_for_answer
from finetune_trainer.processes.container import LONGEST_WAIT_SECONDS, wait_until_told
from finetune_trainer.processes.devices import hide_devices
from finetune_trainer.processes.start import name_of_process, preload_for_forks, send_output_to
from finetune_trainer.ranks.logs import CappedFile, RankLogs, rank_log_name, show
from finetune_trainer.ranks.reports import (
    SilentEvidence,
    failed_ranks,
    rank_process_name,
    rank_report_name,
    read_rank_reports,
    remove_rank_reports,
    root_cause,
    silent_failures,
)
from finetune_trainer.ranks.stalls import heartbeat_file_name, read_heartbeat, read_stall, remove_traces, stall_timeouts

log = logging.getLogger(__name__)
RESOLVE_SECONDS = 600.0
"""How long a master's name may stay unknown: the pod may still pull its image, and DNS caches denials for half a minute."""
OUTPUT_TAIL_BYTES = 1 << 18
"""How much of torchrun's own output is kept in memory, to read its summary."""
_OWN_SIGNALS = (signal.SIGTERM,)
"""Which this process handles, and its forks otherwise."""
_FORK = "fork"
_ANSWER_BYTES, _ANSWER_SECONDS = 64, 30.0
"""Of a fork that says whether it could use the device."""
LOOPBACK = "127.0.0.1"
LIBRARIES = ("torch.distributed.run", "finetune_trainer.train.rank")
"""What torchrun's agent and the ranks need."""
RANK_SCRIPT = Path(__file__).parents[1] / "train" / "__main__.py"
MEMORY_EVENTS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
"""What the kernel counts for the container's cgroup, in version 2 and in version 1; the first that exists is read."""


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


class MasterUnreachableError(ConnectionError):
    """The name of node rank 0 did not resolve in time."""


def supervise(context: RunContext, launch: Launch) -> TerminationReport:
    """Run this node's ranks to their end; the report of the node.

    SIGTERM stays taken after the return, so that another one cannot end the process before its report is written.
    """
    role = Role.TRAIN.value
    _require_ordered_for_other_sizes(context, launch)
    stopped = threading.Event()
    reports_directory = context.workspace.reports(role, context.attempt)
    remove_rank_reports(reports_directory, _local_ranks(context, launch))
    remove_traces(context.workspace.stacks(context.attempt), _local_ranks(context, launch))
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopped.set())
    require_links_inside(context.base_model, context.base_model_root)
    preload_for_forks(context.plan, *LIBRARIES)
    if launch.attempt_file is not None and not wait_until_told(launch.attempt_file, context.attempt, stopped):
        said = "stopped by SIGTERM" if stopped.is_set() else f"the operator did not name it within {LONGEST_WAIT_SECONDS:.0f} s"
        return _preempted(context, launch, f"attempt {context.attempt} did not begin in the pod of the one before: {said}")
    if launch.node_rank > 0:
        wait_until_resolved(launch.master_address, stopped)
    exit_status, output = (0, "") if stopped.is_set() else _run_torchrun(context, launch, stopped)
    reports = read_rank_reports(reports_directory)
    succeeded = {report.rank for report in reports if report.outcome is Outcome.SUCCEEDED}
    # What is told to a rank that has succeeded, or kills it, changes nothing any more.
    is_done = succeeded.issuperset(_local_ranks(context, launch))
    if stopped.is_set() and not is_done:
        return _stopped(context, launch, reports)
    if exit_status == 0 or is_done:
        facts = next((report.facts for report in reports if report.rank == 0), {})
        return TerminationReport(
            role=role,
            attempt=context.attempt,
            outcome=Outcome.SUCCEEDED,
            node_rank=launch.node_rank,
            time=time.time(),
            facts=facts,
        )
    codes = failed_ranks(output)
    reports += silent_failures(
        codes,
        reports,
        SilentEvidence(
            role=role,
            attempt=context.attempt,
            node_rank=launch.node_rank,
            is_out_of_memory=was_out_of_memory(),
            log_ends={rank: _log_end(context, rank) for rank in codes},
            now=time.time(),
        ),
    )
    cause = root_cause(reports)
    if cause is None:
        cause = TerminationReport(
            role=role,
            attempt=context.attempt,
            outcome=Outcome.FAILED,
            failure=FailureClass.INTERNAL,
            message=f"torchrun exited with code {exit_status} before any rank reported",
            hint="see torchrun's log on the workspace",
            exception=output[-4000:],
            time=time.time(),
        )
    return cause.model_copy(update={"node_rank": launch.node_rank if cause.rank is None else cause.node_rank})


def _require_ordered_for_other_sizes(context: RunContext, launch: Launch) -> None:
    """Raises ConfigError."""
    asked = {"--ranks": launch.ranks, "--nodes": launch.nodes}
    given = next(((name, value) for name, value in asked.items() if value is not None), None)
    if given is not None and context.plan.training.reduction is not GradientReduction.ORDERED:
        raise ConfigError(
            f"{given[0]} {given[1]}: the plan's ranks add up gradients in an order of their own number",
            f"leave {given[0]} out, or set spec.training.reduction to Ordered",
        )


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
        "--nproc-per-node": len(_local_ranks(context, launch)),
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


def _local_ranks(context: RunContext, launch: Launch) -> range:
    """Global ranks on this node, by local rank."""
    num_ranks = launch.ranks or context.plan.parallelism.processes_per_node
    return range(launch.node_rank * num_ranks, (launch.node_rank + 1) * num_ranks)


def _run_torchrun(context: RunContext, launch: Launch, stopped: threading.Event) -> tuple[int, str]:
    """The agent's exit status and the end of what it said."""
    logs = context.workspace.logs(Role.TRAIN.value, context.attempt)
    ended = threading.Event()
    rank_logs = RankLogs(logs, _local_ranks(context, launch))
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
            target=end_after_verdict, args=(context, _local_ranks(context, launch), agent, ended), daemon=True
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


def wait_until_resolved(host: str, stopped: threading.Event, seconds: float = RESOLVE_SECONDS) -> None:
    """Wait until `host` has an address or a stop is asked for. Raises MasterUnreachableError."""
    deadline = time.monotonic() + seconds
    while not stopped.is_set():
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise MasterUnreachableError(
                    f"rendezvous: the master address {host} did not resolve in {seconds:.0f} s ({error}); name the cluster's DNS "
                    "servers in network.dns of the profile, `finetune doctor` tries whether pods reach them"
                ) from error
        stopped.wait(1.0)


def _stopped(context: RunContext, launch: Launch, reports: list[TerminationReport]) -> TerminationReport:
    steps = [report.step for report in reports if report.failure is FailureClass.PREEMPTED and report.step is not None]
    until = (
        f"after step {steps[0]}; the state is saved" if steps else "before the state could be saved; the last checkpoint is kept"
    )
    return _preempted(context, launch, f"stopped by SIGTERM {until}", steps[0] if steps else None)


def _preempted(context: RunContext, launch: Launch, message: str, step: int | None = None) -> TerminationReport:
    return TerminationReport(
        role=Role.TRAIN.value,
        attempt=context.attempt,
        outcome=Outcome.FAILED,
        failure=FailureClass.PREEMPTED,
        message=message,
        node_rank=launch.node_rank,
        step=step,
        time=time.time(),
    )


def _log_end(context: RunContext, rank: int) -> str:
    path = context.workspace.logs(Role.TRAIN.value, context.attempt) / rank_log_name(rank)
    try:
        return read_own(path)[-OUTPUT_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""


def was_out_of_memory(events: Sequence[Path] = MEMORY_EVENTS) -> bool:
    """Whether the kernel has killed a process of this container for memory."""
    for path in events:
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(counts.get("oom_kill", 0)) > 0
    return False

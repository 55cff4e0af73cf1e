"""The `train` role in each pod: wait until the master's name resolves, run torchrun, report the root cause.

The rendezvous is static, so torchrun never restarts ranks. A gang of one pod is restarted here by its supervisor, which sees the
ranks end. The operator restarts larger gangs as a whole.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from finetune_job.api.training import GradientReduction
from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.names import Role
from finetune_trainer.context import RunContext
from finetune_trainer.errors import ConfigError
from finetune_trainer.files import read_own
from finetune_trainer.inspection.special_files import require_links_inside
from finetune_trainer.ranks.logs import rank_log_name
from finetune_trainer.ranks.reports import SilentEvidence, failed_ranks, read_rank_reports, root_cause, silent_failures
from finetune_trainer.ranks.restarts import read_restarts, remove_traces_of_ranks, restart_after, set_traces_aside, write_restarts
from finetune_trainer.roles.torchrun import OUTPUT_TAIL_BYTES, Launch, Torchrun, local_ranks

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
RESOLVE_SECONDS = 600.0
"""Time that the master's name may stay unresolved: its pod may still be pulling the image, and DNS caches negative answers for
half a minute.
"""
MEMORY_EVENTS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
"""The kernel's counters for the container's cgroup, in version 2 and in version 1; the first that exists is read."""


class MasterUnreachableError(ConnectionError):
    """The name of node rank 0 did not resolve in time."""


def supervise(context: RunContext, launch: Launch) -> TerminationReport:
    """Run this node's ranks to their end; returns the report of the node.

    If only processes failed, a gang of one node is started again here, at most `launch.restarts` times.

    SIGTERM stays handled after the return, so that a second signal cannot end the process before its report is written.
    """
    _require_ordered_for_other_sizes(context, launch)
    stopped = threading.Event()
    remove_traces_of_ranks(context, local_ranks(context, launch))
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopped.set())
    require_links_inside(context.base_model, context.base_model_root)
    if launch.node_rank > 0:
        wait_until_resolved(launch.master_address, stopped)
    # A queue may have stopped this attempt and started it again in another pod, so earlier restarts are read from a file.
    restarts = read_restarts(context.workspace.restarts(context.attempt))
    kills_before = kills_for_memory()
    if stopped.is_set():
        return _stopped(context, launch, [])
    with Torchrun(context, launch, stopped) as torchrun:
        while True:
            exit_status, output = torchrun.run()
            report = _report(context, launch, exit_status, output, stopped, was_out_of_memory=kills_for_memory() > kills_before)
            restart = restart_after(report, num_restarts=len(restarts), most=launch.restarts, now=time.time())
            if restart is None or stopped.is_set() or not torchrun.can_run_again:
                return report.model_copy(update={"restarts": restarts})
            restarts.append(restart)
            log.error(
                "%s: starting the ranks again from the latest checkpoint (restart %d of at most %d in this attempt)",
                restart.message,
                len(restarts),
                launch.restarts,
            )
            set_traces_aside(context, len(restarts))
            write_restarts(context.workspace.restarts(context.attempt), restarts)


def _report(
    context: RunContext, launch: Launch, exit_status: int, output: str, stopped: threading.Event, *, was_out_of_memory: bool
) -> TerminationReport:
    """Make the node's report on one run of its ranks."""
    role = Role.TRAIN.value
    reports = read_rank_reports(context.workspace.reports(role, context.attempt))
    succeeded = {report.rank for report in reports if report.outcome is Outcome.SUCCEEDED}
    # A rank that has succeeded stays successful even if a signal, such as SIGKILL, ends it afterwards.
    is_done = succeeded.issuperset(local_ranks(context, launch))
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
            is_out_of_memory=was_out_of_memory,
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
    """Raise ConfigError if the launch sets a number of ranks or nodes and the reduction is not ordered."""
    asked = {"--ranks": launch.ranks, "--nodes": launch.nodes}
    differing = next(((name, value) for name, value in asked.items() if value is not None), None)
    if differing is not None and context.plan.training.reduction is not GradientReduction.ORDERED:
        raise ConfigError(
            f"{differing[0]} {differing[1]}: the plan's ranks add gradients in an order that depends on their number",
            f"leave {differing[0]} out, or set spec.training.reduction to Ordered",
        )


def wait_until_resolved(host: str, stopped: threading.Event, seconds: float = RESOLVE_SECONDS) -> None:
    """Wait until `host` has an address or a stop is requested. Raises MasterUnreachableError."""
    deadline = time.monotonic() + seconds
    while not stopped.is_set():
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise MasterUnreachableError(
                    f"rendezvous: the master address {host} did not resolve in {seconds:.0f} s ({error}); name the cluster's DNS "
                    "servers in network.dns of the profile; `finetune doctor` tests whether pods reach them"
                ) from error
        # Not `stopped.wait`: it could hold the event's lock when the signal arrives, and the handler needs that lock.
        time.sleep(LOOK_SECONDS)


def _stopped(context: RunContext, launch: Launch, reports: list[TerminationReport]) -> TerminationReport:
    steps = [report.step for report in reports if report.failure is FailureClass.PREEMPTED and report.step is not None]
    until = (
        f"after step {steps[0]}; the state is saved" if steps else "before the state could be saved; the last checkpoint is kept"
    )
    return TerminationReport(
        role=Role.TRAIN.value,
        attempt=context.attempt,
        outcome=Outcome.FAILED,
        failure=FailureClass.PREEMPTED,
        message=f"stopped by SIGTERM {until}",
        node_rank=launch.node_rank,
        step=steps[0] if steps else None,
        time=time.time(),
    )


def _log_end(context: RunContext, rank: int) -> str:
    path = context.workspace.logs(Role.TRAIN.value, context.attempt) / rank_log_name(rank)
    try:
        return read_own(path)[-OUTPUT_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""


def kills_for_memory(events: Sequence[Path] = MEMORY_EVENTS) -> int:
    """Return how many processes of this container the kernel has killed for lack of memory."""
    for path in events:
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts.get("oom_kill", 0))
        except (OSError, ValueError):
            continue
    return 0

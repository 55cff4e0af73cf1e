"""One rank: it joins the gang, trains, and leaves a report of how it ended."""

from __future__ import annotations

import logging
import sys
import time

from transformers.utils import logging as transformers_logging

from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.names import Role
from finetune_trainer.context import RunContext
from finetune_trainer.ranks.determinism import keep_float32, pin_kernels
from finetune_trainer.ranks.device_test import check_device
from finetune_trainer.ranks.gang import ENVIRONMENT, joined, launched_rank
from finetune_trainer.ranks.reports import ECHO_SECONDS, date_echo, write_rank_report
from finetune_trainer.ranks.stalls import JOIN
from finetune_trainer.ranks.watchdog import Heartbeat, Watchdog
from finetune_trainer.termination import exit_code, failure_report
from finetune_trainer.train.run import StopRequest, train

log = logging.getLogger(__name__)


def run_launched_rank(context: RunContext, *, node_rank: int, observe_port: int) -> int:
    """Run the rank that torchrun's environment names, and return the exit code."""
    rank, world_size, local_rank = launched_rank()
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s %(levelname)s rank {rank} %(name)s %(message)s",
        stream=sys.stderr,
    )
    # Progress bars redraw themselves with carriage returns, which would produce one endless line in a log file.
    transformers_logging.disable_progress_bar()
    stop = StopRequest()
    report = run_rank(
        context,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        node_rank=node_rank,
        observe_port=observe_port,
        stop=stop,
    )
    if report.outcome is Outcome.SUCCEEDED:
        stop.leave()
    return exit_code(report)


def run_rank(
    context: RunContext,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    node_rank: int,
    observe_port: int,
    init_method: str = ENVIRONMENT,
    stop: StopRequest | None = None,
) -> TerminationReport:
    """Train as this rank and write its report to the workspace. A rank that failed because of another waits before returning.

    Call this in the main thread. SIGTERM is handled only after all ranks have joined. Until then it kills the process, which has
    nothing to save and could otherwise wait for ranks that the same signal has already killed.
    """
    role = Role.TRAIN.value
    directory = context.workspace.reports(role, context.attempt)
    heartbeat = Heartbeat()
    stop = stop or StopRequest()
    keep_float32()
    if context.plan.training.deterministic:
        pin_kernels()
    try:
        heartbeat.begin(JOIN, 0)
        with (
            Watchdog(context, heartbeat, rank=rank, world_size=world_size, node_rank=node_rank).watching(),
            joined(rank, world_size, local_rank, init_method, context.plan.training.step_timeout_seconds) as gang,
        ):
            heartbeat.begin("start", 0)
            stop.install()
            reached = check_device(gang) if gang.device.type == "cuda" else None
            facts = train(context, gang, stop, observe_port, heartbeat, reached)
        report = TerminationReport(
            role=role,
            attempt=context.attempt,
            outcome=Outcome.SUCCEEDED,
            rank=rank,
            node_rank=node_rank,
            time=time.time(),
            facts=facts,
        )
    except BaseException as error:
        log.exception("rank %d failed", rank)
        report = date_echo(failure_report(error, role, context.attempt, rank, node_rank, finished_steps=heartbeat.latest.step))
    write_rank_report(directory, report)
    if report.failure is FailureClass.COLLECTIVE:
        _wait_for_the_cause(stop)
    return report


def _wait_for_the_cause(stop: StopRequest) -> None:
    deadline = time.monotonic() + ECHO_SECONDS
    while time.monotonic() < deadline and not stop.requested:
        time.sleep(0.1)

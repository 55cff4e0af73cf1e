"""One rank, as torchrun starts it: join the gang, train, and leave a report that says how it ended."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.names import OBSERVE_PORT, Role
from finetune_trainer.context import RunContext, add_run_arguments, run_context
from finetune_trainer.ranks.gang import ENVIRONMENT, joined, launched_rank
from finetune_trainer.ranks.reports import ECHO_SECONDS, date_echo, write_rank_report
from finetune_trainer.ranks.watchdog import Heartbeat, Watchdog
from finetune_trainer.termination import exit_code, failure_report
from finetune_trainer.train.run import StopRequest, train

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; the exit code."""
    arguments = _parser().parse_args(argv)
    rank, world_size, local_rank = launched_rank()
    if arguments.output_pipes is not None:
        send_output_to(arguments.output_pipes / str(local_rank))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s %(levelname)s rank {rank} %(name)s %(message)s",
        stream=sys.stderr,
    )
    # Bars redraw themselves with carriage returns, which makes one endless line of a log file.
    transformers_logging.disable_progress_bar()
    context = run_context(arguments)
    report = run_rank(
        context,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        node_rank=arguments.node_rank,
        observe_port=arguments.observe_port,
    )
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
) -> TerminationReport:
    """Train as this rank and keep its report on the workspace; a rank that is only an echo waits before it returns.

    Call in the main thread: SIGTERM is taken from the moment at which all ranks have joined. Until then it ends the process,
    which has nothing to save, and would wait for ranks that the same signal has ended before they could take it.
    """
    role = Role.TRAIN.value
    directory = context.workspace.reports(role, context.attempt)
    heartbeat = Heartbeat()
    stop = StopRequest()
    try:
        with (
            Watchdog(context, heartbeat, rank=rank, world_size=world_size, node_rank=node_rank).watching(),
            joined(rank, world_size, local_rank, init_method, context.plan.training.step_timeout_seconds) as gang,
        ):
            stop.install()
            facts = train(context, gang, stop, observe_port, heartbeat)
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


def send_output_to(pipe: Path) -> None:
    """Let this process write its output, native libraries' included, into a pipe that the supervisor reads."""
    descriptor = os.open(pipe, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _wait_for_the_cause(stop: StopRequest) -> None:
    deadline = time.monotonic() + ECHO_SECONDS
    while time.monotonic() < deadline and not stop.requested:
        time.sleep(0.1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.train", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--observe-port", type=int, default=OBSERVE_PORT)
    parser.add_argument("--output-pipes", type=Path, default=None)
    return parser

"""Watchdogs of forked ranks that stop: who is named, what is left, and that every process ends."""

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from finetune_job.failures import EXIT_CODES, FailureClass, TerminationReport
from finetune_trainer.context import RunContext
from finetune_trainer.ranks import watchdog
from finetune_trainer.ranks.gang import joined
from finetune_trainer.ranks.reports import read_rank_reports, root_cause
from finetune_trainer.ranks.stalls import JOIN, StallTimeouts, flight_recorder_name, stacks_name
from finetune_trainer.ranks.watchdog import STEP, Heartbeat, Watchdog
from tests.support.forked_ranks import run_processes
from tests.support.tiny_model import run_context, tiny_spec

STALLED, ECHO = EXIT_CODES[FailureClass.STALLED], EXIT_CODES[FailureClass.COLLECTIVE]
STEPS, FAULTY_STEP = 8, 5


def wait_for_data_that_never_comes() -> None:
    threading.Event().wait()


def stop_until_the_other_rank_is_gone(pid_file: Path) -> None:
    """SIGSTOP to this process. A child does what an agent does: once another rank has ended it kills this one."""
    other, own = int(pid_file.read_text()), os.getpid()
    if os.fork() == 0:
        deadline = time.monotonic() + 150
        while Path(f"/proc/{other}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(own, signal.SIGKILL)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)


def _rank(
    context: RunContext, store: str, rank: int, fault: Callable[[], None] | None, export_seconds: float, allowed: StallTimeouts
) -> int:
    watchdog.stall_timeouts = lambda _seconds: allowed  # type: ignore[assignment]
    heartbeat = Heartbeat()
    if rank == 0:
        pid_file(context).write_text(str(os.getpid()))
    with Watchdog(context, heartbeat, rank=rank, world_size=2, node_rank=rank).watching(), joined(rank, 2, rank, store) as gang:
        for step in range(1, STEPS):
            if fault is not None and step == FAULTY_STEP:
                fault()
            gang.sum([1.0])
            heartbeat.beat(STEP, step)
        if gang.is_first and export_seconds:
            heartbeat.begin("export", STEPS)
            time.sleep(export_seconds)
        gang.barrier()
    return 0


def pid_file(context: RunContext) -> Path:
    return context.workspace.root / "pid"


def run(
    tmp_path: Path, fault: Callable[[], None] | None = None, export_seconds: float = 0.0, silence: float = 3.0, step: float = 1.0
) -> tuple[RunContext, list[int]]:
    context = run_context(tmp_path, tiny_spec())
    allowed = StallTimeouts(step=step, long=60.0, start=60.0, silence=silence)
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        codes = run_processes(
            [partial(_rank, context, store, rank, fault if rank else None, export_seconds, allowed) for rank in (0, 1)]
        )
    return context, codes


def cause_of(context: RunContext) -> TerminationReport:
    cause = root_cause(read_rank_reports(context.workspace.reports("train", 0)))
    assert cause is not None
    return cause


def test_a_rank_that_waits_forever_is_named_with_its_place_and_all_stacks(tmp_path: Path) -> None:
    context, codes = run(tmp_path, wait_for_data_that_never_comes)
    assert codes == [ECHO, STALLED]
    cause = cause_of(context)
    assert (cause.failure, cause.rank, cause.node_rank, cause.step) == (FailureClass.STALLED, 1, 1, FAULTY_STEP - 1)
    assert "in wait_for_data_that_never_comes" in cause.message
    assert "wait_for_data_that_never_comes" in cause.exception
    directory = context.workspace.stacks(0)
    assert "gang.py" in (directory / stacks_name(0)).read_text()
    assert "wait_for_data_that_never_comes" in (directory / stacks_name(1)).read_text()
    recorded = [json.loads((directory / flight_recorder_name(rank)).read_bytes())["entries"] for rank in (0, 1)]
    assert len(recorded[0]) > len(recorded[1]) > 0


def test_a_rank_that_is_stopped_is_named_by_the_others(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    context, codes = run(tmp_path, partial(stop_until_the_other_rank_is_gone, pid_file(context)))
    assert codes == [ECHO, -signal.SIGKILL]
    cause = cause_of(context)
    assert (cause.failure, cause.rank, cause.step) == (FailureClass.STALLED, 1, FAULTY_STEP - 1)
    assert "rank 1 gives no sign of life" in cause.message
    assert (context.workspace.stacks(0) / stacks_name(0)).is_file()
    assert not (context.workspace.stacks(0) / stacks_name(1)).exists()


def _never_joins(context: RunContext, store: str, rank: int, world_size: int) -> int:
    allowed = StallTimeouts(step=600.0, long=600.0, start=3.0, silence=3.0)
    watchdog.stall_timeouts = lambda _seconds: allowed  # type: ignore[assignment]
    heartbeat = Heartbeat()
    heartbeat.begin(JOIN, 0)
    with Watchdog(context, heartbeat, rank=rank, world_size=world_size, node_rank=rank).watching():
        if rank == 1:
            wait_for_data_that_never_comes()
        with joined(rank, world_size, rank, store):
            return 1


def test_a_rank_that_never_joins_the_others_is_named_long_before_a_step_would_be(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    store = f"file://{tmp_path}/store"
    assert run_processes([partial(_never_joins, context, store, rank, 2) for rank in (0, 1)]) == [ECHO, STALLED]
    cause = cause_of(context)
    assert (cause.failure, cause.rank) == (FailureClass.STALLED, 1)
    assert "since 'join' at step 0; it is at ranks/test_watchdog.py" in cause.message
    assert "wait_for_data_that_never_comes" in cause.exception
    assert "init_process_group" in (context.workspace.stacks(0) / stacks_name(0)).read_text()


def _waits_for_a_rank_that_is_not_there(context: RunContext, store: str) -> int:
    threading.Timer(12.0, os._exit, (7,)).start()
    return _never_joins(context, store, 0, 2)


def test_waiting_for_a_rank_whose_node_is_not_there_yet_is_no_stall(tmp_path: Path) -> None:
    context = run_context(tmp_path, tiny_spec())
    assert run_processes([partial(_waits_for_a_rank_that_is_not_there, context, f"file://{tmp_path}/store")]) == [7]
    assert read_rank_reports(context.workspace.reports("train", 0)) == []


def test_waiting_for_a_long_export_is_no_stall(tmp_path: Path) -> None:
    # Rank 1 waits in a barrier for several times as long as its own allowance and a silence. On a machine that does much else a
    # step may take more than a second.
    context, codes = run(tmp_path, export_seconds=8.0, step=2.5)
    assert codes == [0, 0]
    assert not context.workspace.stacks(0).exists()
    assert read_rank_reports(context.workspace.reports("train", 0)) == []


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_rank_ends_even_where_nothing_can_be_written(tmp_path: Path, is_writable: bool) -> None:
    context = run_context(tmp_path, tiny_spec())
    if not is_writable:
        context.workspace.stacks(0).parent.write_text("no directory")
    assert run_processes([partial(_alone, context)]) == [STALLED]


def _alone(context: RunContext) -> int:
    watchdog.stall_timeouts = lambda _seconds: StallTimeouts(step=0.2, long=0.2, start=0.2, silence=1.0)  # type: ignore[assignment]
    with Watchdog(context, Heartbeat(), rank=0, world_size=1, node_rank=0).watching():
        threading.Event().wait()
    return 0

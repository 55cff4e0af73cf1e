"""The supervisor's guard: ranks that never speak are named, with their stacks; those that do not end are ended.

The guard looks at real processes that stand for ranks. What a gang with such a rank does as a whole is in test_train.py.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_trainer.context import RunContext
from finetune_trainer.processes.child import Child, start
from finetune_trainer.ranks.reports import read_rank_reports, write_rank_report
from finetune_trainer.ranks.stalls import StallTimeouts, heartbeat_file_name, read_stall
from finetune_trainer.roles import rank_guard
from finetune_trainer.roles.rank_guard import LocalRanks, RankGuard
from tests.support.tiny_model import plan_of, tiny_spec

PATIENCE_SECONDS = 120.0
RANK = """
import sys, threading, time
from pathlib import Path
from finetune_trainer.processes.start import name_process
from finetune_trainer.ranks.start_signs import leave_start_signs
rank, directory = int(sys.argv[1]), Path(sys.argv[2])
name_process(f"rank-{rank:05d}")
leave_start_signs(directory, rank)
def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
waits_for_a_lock()
"""


def test_a_node_is_silent_once_its_first_rank_has_started_so_long_ago() -> None:
    seen = LocalRanks()
    assert seen.silent([4, 5], 10.0, 1000.0) == [], "torchrun waits for other nodes before it starts any"
    seen.see([5], [], [], 1000.0)
    assert seen.silent([4, 5], 10.0, 1009.0) == []
    assert seen.silent([4, 5], 10.0, 1010.0) == [4, 5]
    seen.see([4, 5], [5], [], 1011.0)
    assert seen.silent([4, 5], 10.0, 1010.0) == [4]
    # A heartbeat goes when a rank ends in order; having spoken once is enough.
    seen.see([4, 5], [], [4], 1012.0)
    assert seen.silent([4, 5], 10.0, 2000.0) == []


def test_a_rank_is_endless_so_long_after_its_report() -> None:
    seen = LocalRanks()
    seen.see([0, 1], [0, 1], [1], 50.0)
    assert seen.endless(20.0, 69.0) == []
    assert seen.endless(20.0, 70.0) == [1]


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    context = RunContext(plan_of(tiny_spec()), "", tmp_path, 0)
    context.workspace.root.mkdir(parents=True)
    return context


class Node:
    """Two ranks below an agent that only waits, and a guard of them."""

    def __init__(self, context: RunContext, pipes: Path) -> None:
        self.context, self.pipes = context, pipes
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.agent: Child = start(["sleep", "3600"], os.environ, stdout=2)
        self.guard = RankGuard(context, range(2), 3, pipes, self.agent)

    def start_rank(self, rank: int) -> None:
        command = [sys.executable, "-c", RANK, str(rank), str(self.pipes)]
        self.ranks.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}))
        eventually((self.pipes / f"started-{rank}").exists)

    def speak(self, rank: int) -> None:
        stacks = self.context.workspace.stacks(0)
        stacks.mkdir(parents=True, exist_ok=True)
        (stacks / heartbeat_file_name(rank)).write_text("{}")


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the deadline passed"
        time.sleep(0.05)


@pytest.fixture
def node(context: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(rank_guard, "LOOK_SECONDS", 0.05)
    allowed = StallTimeouts(step=60.0, long=60.0, start=1.0, silence=0.5)
    monkeypatch.setattr(rank_guard, "stall_timeouts", lambda _: allowed)
    (pipes := tmp_path / "pipes").mkdir()
    node = Node(context, pipes)
    with node.agent:
        yield node
        node.guard.end()
    for process in node.ranks:
        process.kill()
        process.wait()


def test_a_rank_that_never_speaks_is_named_with_its_stacks_and_ended(node: Node, context: RunContext) -> None:
    node.speak(1)
    node.start_rank(1)
    node.start_rank(0)
    node.guard.begin()
    assert node.ranks[1].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert node.ranks[0].poll() is None, "a rank that has spoken is left to its own watchdog"
    (report,) = read_rank_reports(context.workspace.reports("train", 0))
    assert (report.failure, report.rank, report.node_rank) == (FailureClass.STALLED, 0, 3)
    assert "rank 0 has given no sign of life within 1 s of the start" in report.message
    assert "waits_for_a_lock" in report.exception
    stall = read_stall(context.workspace.stacks(0))
    assert stall is not None
    assert (stall.silent, stall.declared_by) == ([0], None)
    # Ranks that do not end after a verdict end with their agent.
    assert node.agent.wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_a_rank_that_was_never_made_is_named_too(node: Node, context: RunContext) -> None:
    node.speak(0)
    node.start_rank(0)
    node.guard.begin()
    assert node.agent.wait(PATIENCE_SECONDS) == -signal.SIGTERM
    (report,) = read_rank_reports(context.workspace.reports("train", 0))
    assert (report.rank, report.exception) == (1, "rank 1:\nits process was not started, or has ended")


def test_a_rank_that_runs_on_after_its_report_is_ended_and_then_its_agent(
    node: Node, context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_guard, "END_SECONDS", 0.5)
    monkeypatch.setattr(rank_guard, "AGENT_END_SECONDS", 1.5)
    reports = context.workspace.reports("train", 0)
    for rank in (0, 1):
        node.start_rank(rank)
        write_rank_report(reports, TerminationReport(role="train", outcome=Outcome.SUCCEEDED, rank=rank))
    node.guard.begin()
    assert [process.wait(PATIENCE_SECONDS) for process in node.ranks] == [-signal.SIGKILL] * 2
    assert node.agent.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert read_stall(context.workspace.stacks(0)) is None
    assert {report.outcome for report in read_rank_reports(reports)} == {Outcome.SUCCEEDED}


def test_nothing_is_done_while_no_rank_has_started(node: Node, context: RunContext) -> None:
    """The agent waits for other nodes, as long as the operator does."""
    node.guard.begin()
    time.sleep(2.5)
    assert node.agent.wait(0) is None
    assert read_stall(context.workspace.stacks(0)) is None

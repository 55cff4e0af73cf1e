"""The train role as a pod runs it: real torchrun and ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import psutil
import pytest

from finetune_cli.local.launch import free_port
from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_job.names import SHUTDOWN_SECONDS
from finetune_job.progress import Progress
from finetune_trainer.context import RunContext
from finetune_trainer.errors import classify
from finetune_trainer.processes.start import name_of_process
from finetune_trainer.ranks.reports import rank_process_name
from finetune_trainer.report.timeline import read_timeline
from finetune_trainer.roles.train import MasterUnreachableError, wait_until_resolved
from finetune_trainer.train.run import StopRequest
from tests.support.forked_ranks import run_processes
from tests.support.tiny_model import run_context, tiny_spec
from tests.unit.finetune_trainer.roles import late_signal, told_devices

DEADLINE_SECONDS = 240.0
ENDLESS = {"maxSteps": 100_000, "globalBatchSize": 2}


class Pod:
    """One supervisor."""

    def __init__(
        self,
        context: RunContext,
        port: int,
        node_rank: int = 0,
        module: str = "finetune_trainer",
        variables: Mapping[str, str] | None = None,
        restarts: int = 0,
    ) -> None:
        self.context = context
        self.termination_log = context.claims_root / f"termination-{node_rank}.json"
        arguments: dict[str, Any] = {
            "--plan": context.workspace.root / "plan.json",
            "--plan-sha256": context.plan_sha256,
            "--claims-root": context.claims_root,
            "--termination-log": self.termination_log,
            "--master-port": port,
            "--master-address": "localhost",
            "--node-rank": node_rank,
            "--observe-port": 0,
            "--restarts": restarts,
        }
        given = ["train", *(part for pair in arguments.items() for part in pair)]
        self.process = start_program(module, given, variables)

    def report(self) -> TerminationReport:
        """After the end."""
        self.process.wait(DEADLINE_SECONDS)
        report = parse_envelope(self.termination_log.read_text())
        assert report is not None
        return report

    def ask(self, path: str) -> str | None:
        """What rank 0 answers, None while it does not."""
        try:
            port = json.loads((self.context.workspace.root / "observe.json").read_text())["port"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
                return str(response.read().decode())
        except (OSError, ValueError, urllib.error.URLError):
            return None

    def wait_for_step(self, step: int) -> Progress:
        """Until rank 0 says that `step` is done."""

        def reached() -> Progress | None:
            assert self.process.poll() is None, self.termination_log.read_text()
            answer = self.ask("/progress")
            progress = Progress.model_validate_json(answer) if answer else None
            return progress if progress and progress.step >= step else None

        return eventually(reached)


def start_program(module: str, arguments: Sequence[object], variables: Mapping[str, str] | None = None) -> Popen[bytes]:
    """`python -m module arguments`, as the leader of a session; what it prints is lost."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    files = {"stdin": DEVNULL, "stdout": DEVNULL}
    return Popen(command, env={**os.environ, **(variables or {})}, start_new_session=True, **files)


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    pause = threading.Event()
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        pause.wait(0.1)
    raise AssertionError("the deadline passed")


@pytest.fixture
def start() -> Iterator[Callable[..., Pod]]:
    pods: list[Pod] = []

    def starter(context: RunContext, port: int, node_rank: int = 0, **others: Any) -> Pod:
        pods.append(Pod(context, port, node_rank, **others))
        return pods[-1]

    yield starter
    for pod in pods:
        if pod.process.poll() is None:
            os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait()


@pytest.fixture
def port() -> int:
    return free_port()


def test_two_nodes_train_together(tmp_path: Path, port: int, start: Callable[..., Pod]) -> None:
    context = run_context(tmp_path, tiny_spec(parallelism={"nodes": 2, "processesPerNode": 1}))
    (temporary := tmp_path / "temporary").mkdir()
    pods = [start(context, port, node_rank, variables={"TMPDIR": str(temporary)}) for node_rank in (0, 1)]
    reports = [pod.report() for pod in pods]
    assert [pod.process.returncode for pod in pods] == [0, 0]
    assert reports[0].facts["step"] == "6"
    assert float(reports[0].facts["eval_loss"]) > 0
    assert (context.workspace.adapter / "adapter_model.safetensors").is_file()
    logs = sorted(path.name for path in context.workspace.logs("train", 0).iterdir())
    assert {"rank-00000.log", "torchrun-0.log", "torchrun-1.log"} <= set(logs)
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's own cache


def test_sigterm_to_one_node_saves_and_preempts_both(tmp_path: Path, port: int, start: Callable[..., Pod]) -> None:
    spec = tiny_spec(training=ENDLESS, parallelism={"nodes": 2, "processesPerNode": 1}, checkpoint={"everySteps": 1000})
    context = run_context(tmp_path, spec)
    pods = [start(context, port, node_rank) for node_rank in (0, 1)]
    pods[0].wait_for_step(2)
    assert "finetune_training_loss" in (pods[0].ask("/metrics") or "")
    assert pods[0].ask("/healthz") == "ok\n"
    pods[1].process.send_signal(signal.SIGTERM)
    reports = [pod.report() for pod in pods]
    assert [pod.process.returncode for pod in pods] == [EXIT_CODES[FailureClass.PREEMPTED]] * 2
    saved = int((context.workspace.checkpoints / "latest").read_text().strip().removeprefix("step-"))
    assert saved >= 3
    assert [report.step for report in reports] == [saved, saved]


def test_a_killed_rank_is_named_as_the_cause(tmp_path: Path, port: int, start: Callable[..., Pod]) -> None:
    context = run_context(tmp_path, tiny_spec(training=ENDLESS, checkpoint={"everySteps": 1000}))
    pod = start(context, port)
    pod.wait_for_step(2)
    os.kill(pid_of_rank(pod, 1), signal.SIGKILL)
    report = pod.report()
    assert (report.failure, report.rank) == (FailureClass.INTERNAL, 1)
    assert report.message == "rank 1 was killed by signal 9"
    assert pod.process.returncode == EXIT_CODES[FailureClass.INTERNAL]
    echo = parse_envelope((context.workspace.reports("train", 0) / "rank-00000.json").read_text())
    assert echo is not None
    assert echo.failure is FailureClass.COLLECTIVE


def test_killed_ranks_are_started_again_in_the_pod_and_the_result_has_the_bytes_of_an_undisturbed_run(
    tmp_path: Path, start: Callable[..., Pod]
) -> None:
    spec = tiny_spec(training={"maxSteps": 40, "globalBatchSize": 2}, checkpoint={"everySteps": 2})
    undisturbed = run_context(tmp_path / "undisturbed", spec)
    assert start(undisturbed, free_port()).report().outcome is Outcome.SUCCEEDED
    context = run_context(tmp_path / "disturbed", spec)
    pod = start(context, free_port(), restarts=2)
    for rank, step in ((1, 4), (0, 12)):
        done = pod.wait_for_step(step)
        os.kill(pid_of_rank(pod, rank), signal.SIGKILL)
        killed = time.monotonic()
        pod.wait_for_step(done.step + 1)
        print(f"{time.monotonic() - killed:.1f} s from the kill of rank {rank} to the next step")
    report = pod.report()
    assert report.outcome is Outcome.SUCCEEDED
    assert [(one.failure, one.rank, one.message) for one in report.restarts] == [
        (FailureClass.INTERNAL, rank, f"rank {rank} was killed by signal 9") for rank in (1, 0)
    ]
    adapters = [(one.workspace.adapter / "adapter_model.safetensors").read_bytes() for one in (undisturbed, context)]
    assert adapters[0] == adapters[1]
    timeline = read_timeline(context.workspace, None)
    assert [(one.number, one.ending) for one in timeline.attempts] == [(0, "Internal"), (0, "Internal"), (0, "finished")]
    assert timeline.attempts[1].first_step > 0


@pytest.mark.nightly
def test_an_attempt_has_as_many_restarts_as_it_may_in_whatever_pod(tmp_path: Path, port: int, start: Callable[..., Pod]) -> None:
    context = run_context(tmp_path, tiny_spec(training=ENDLESS, checkpoint={"everySteps": 1000}))
    pod = start(context, port, restarts=1)
    pod.wait_for_step(2)
    first = pid_of_rank(pod, 1)
    os.kill(first, signal.SIGKILL)

    def restarted() -> bool:
        progress = pod.ask("/progress")
        return progress is not None and len(Progress.model_validate_json(progress).restarts) == 1

    eventually(restarted)
    assert pid_of_rank(pod, 1) != first
    os.kill(pid_of_rank(pod, 0), signal.SIGKILL)
    report = pod.report()
    assert (report.failure, report.rank, [one.rank for one in report.restarts]) == (FailureClass.INTERNAL, 0, [1])
    kept = context.workspace.reports("train", 0).with_name("train-0-before-restart-1")
    assert [path.name for path in sorted(kept.iterdir())] == ["rank-00000.json"]
    # A queue stopped the attempt and started it again in another pod, which has no restart left.
    again = start(context, free_port(), restarts=1)
    again.wait_for_step(2)
    os.kill(pid_of_rank(again, 1), signal.SIGKILL)
    assert [one.rank for one in again.report().restarts] == [1]


@pytest.mark.nightly
def test_a_stop_between_two_runs_of_the_ranks_is_a_preemption(tmp_path: Path, port: int, start: Callable[..., Pod]) -> None:
    context = run_context(tmp_path, tiny_spec(training=ENDLESS, checkpoint={"everySteps": 1000}))
    pod = start(context, port, restarts=2)
    pod.wait_for_step(2)
    os.kill(pid_of_rank(pod, 1), signal.SIGKILL)
    eventually(context.workspace.restarts(0).exists)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.report().failure is FailureClass.PREEMPTED
    assert pod.process.returncode == EXIT_CODES[FailureClass.PREEMPTED]


def test_a_stopped_rank_is_named_and_everything_ends(tmp_path: Path, port: int, start: Callable[..., Pod]) -> None:
    spec = tiny_spec(training={**ENDLESS, "stepTimeoutSeconds": 10}, checkpoint={"everySteps": 1000})
    context = run_context(tmp_path, spec)
    pod = start(context, port)
    pod.wait_for_step(2)
    stopped = pid_of_rank(pod, 1)
    os.kill(stopped, signal.SIGSTOP)
    report = pod.report()
    assert (report.failure, report.rank) == (FailureClass.STALLED, 1)
    assert "rank 1 gives no sign of life" in report.message
    assert pod.process.returncode == EXIT_CODES[FailureClass.STALLED]
    assert "optimizer_step" in (context.workspace.stacks(0) / "rank-00000.txt").read_text()
    assert not Path(f"/proc/{stopped}").exists()


@pytest.mark.nightly
def test_sigterm_again_and_again_is_one_sigterm(tmp_path: Path, port: int, start: Callable[..., Pod]) -> None:
    context = run_context(tmp_path, tiny_spec(training=ENDLESS, checkpoint={"everySteps": 1000}))
    pod = start(context, port)
    pod.wait_for_step(2)
    pause = threading.Event()
    while pod.process.poll() is None and not pod.termination_log.exists():
        pod.process.send_signal(signal.SIGTERM)
        pause.wait(0.05)
    report = pod.report()
    assert pod.process.returncode == EXIT_CODES[FailureClass.PREEMPTED]
    saved = int((context.workspace.checkpoints / "latest").read_text().strip().removeprefix("step-"))
    assert report.step == saved >= 3


@pytest.mark.parametrize("killed", ["agent", pytest.param("supervisor", marks=pytest.mark.nightly)])
def test_no_rank_outlives_what_started_it(tmp_path: Path, port: int, start: Callable[..., Pod], killed: str) -> None:
    """Two gangs would write the same checkpoints: this one, and the one that is started next."""
    pod = start(run_context(tmp_path, tiny_spec(training=ENDLESS, checkpoint={"everySteps": 1000})), port)
    pod.wait_for_step(2)
    ranks = [psutil.Process(pid_of_rank(pod, rank)) for rank in range(2)]
    (agent,) = psutil.Process(pod.process.pid).children()
    assert [rank.parents()[1] for rank in ranks] == [agent, agent]
    (agent if killed == "agent" else pod.process).kill()
    if killed == "agent":
        assert pod.report().failure is FailureClass.INTERNAL
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    else:
        assert psutil.wait_procs(ranks, timeout=DEADLINE_SECONDS)[1] == []


def pid_of_rank(pod: Pod, rank: int) -> int:
    """The process of this rank below this supervisor."""
    supervisor = psutil.Process(pod.process.pid)
    for process in supervisor.children(recursive=True):
        if name_of_process(process.pid) == rank_process_name(rank):
            return process.pid
    raise AssertionError(f"rank {rank} does not run")


@pytest.mark.parametrize("late", ["SIGTERM", "SIGKILL"])
def test_what_comes_after_the_success_of_all_ranks_neither_holds_the_pod_nor_changes_its_end(
    tmp_path: Path, port: int, start: Callable[..., Pod], late: str
) -> None:
    context = run_context(tmp_path, tiny_spec(parallelism={"processesPerNode": 2}))
    pod = start(context, port, module=late_signal.__name__, variables={late_signal.SIGNAL: late})
    # torchrun would wait for its ranks for two minutes, and these for torchrun.
    assert pod.process.wait(SHUTDOWN_SECONDS - 30) == 0
    assert pod.report().outcome is Outcome.SUCCEEDED
    assert context.workspace.adapter.exists()


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "afterwards"])
def test_sigterm_ends_a_rank_that_has_nothing_to_save_any_more(is_late: bool) -> None:
    assert run_processes([partial(_leaves, is_late)]) == [-signal.SIGTERM]


def _leaves(is_late: bool) -> None:
    stop = StopRequest()
    stop.install()
    if not is_late:
        os.kill(os.getpid(), signal.SIGTERM)
    stop.leave()
    if is_late:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.nightly
@pytest.mark.parametrize("visible", [{}, {"CUDA_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}])
def test_forked_ranks_can_use_the_devices_that_the_pod_sees(
    tmp_path: Path, port: int, start: Callable[..., Pod], visible: dict[str, str]
) -> None:
    """torchrun's agent asks for devices before it starts ranks; no fork of a process that asked the driver can use one."""
    context = run_context(tmp_path, tiny_spec(parallelism={"processesPerNode": 2}))
    pod = start(context, port, module=told_devices.__name__, variables=visible)
    assert pod.process.wait(DEADLINE_SECONDS) == 0
    told = [json.loads((tmp_path / f"{told_devices.TOLD}-{rank}").read_text()) for rank in range(2)]
    assert told == [[True, visible.get("CUDA_VISIBLE_DEVICES"), visible.get("HIP_VISIBLE_DEVICES")]] * 2


def test_an_unknown_master_is_an_error_after_the_deadline() -> None:
    with pytest.raises(MasterUnreachableError, match=r"master\.invalid.*network\.dns") as caught:
        wait_until_resolved("master.invalid", threading.Event(), seconds=0.0)
    assert classify(caught.value)[0] is FailureClass.COLLECTIVE


def test_waiting_for_a_master_ends_when_a_stop_is_asked_for() -> None:
    stopped = threading.Event()
    stopped.set()
    wait_until_resolved("master.invalid", stopped)


def test_a_rank_that_waits_for_others_ends_at_once_on_sigterm(tmp_path: Path, port: int) -> None:
    """Others may have been ended before they could take the same signal; it waited for them as long as saving may take."""
    context = run_context(tmp_path, tiny_spec(parallelism={"nodes": 1, "processesPerNode": 2}))
    arguments = ["--plan", str(context.workspace.root / "plan.json"), "--plan-sha256", context.plan_sha256]
    arguments += ["--claims-root", str(tmp_path), "--observe-port", "0"]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank = start_program("finetune_trainer.train", arguments, place)
    try:
        eventually(lambda: _listens(port))
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(DEADLINE_SECONDS / 2) == -signal.SIGTERM
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    assert not context.workspace.checkpoints.exists()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

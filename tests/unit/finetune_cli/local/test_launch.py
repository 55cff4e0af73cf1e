"""The command of a role, the process that forks roles, and how the end of one is told."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_cli.local import launch
from finetune_cli.local.launch import Interruption, RoleArguments, Trainer, outcome, running
from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport
from finetune_job.names import Role


def report(failure: FailureClass | None = None, result: Outcome = Outcome.FAILED) -> TerminationReport:
    return TerminationReport(role="train", outcome=result, failure=failure)


def test_the_command_of_a_role():
    order = RoleArguments(Role.TRAIN, 3, Path("/p/plan.json"), "abc", Path("/c"), Path("/t"), lock=0)
    arguments = order.arguments(29500)
    assert arguments[0] == "train"
    text = " ".join(arguments)
    for part in ("--plan /p/plan.json", "--plan-sha256 abc", "--claims-root /c", "--attempt 3", "--termination-log /t"):
        assert part in text
    assert "--node-rank 0 --master-address 127.0.0.1 --master-port 29500 --observe-port 0" in text
    assert "--ranks" not in text
    assert "--until-step" not in text
    fewer = RoleArguments(Role.TRAIN, 3, Path("/p/plan.json"), "abc", Path("/c"), Path("/t"), lock=0, ranks=1, until_step=4)
    assert " ".join(fewer.arguments(29500)).endswith("--observe-port 0 --ranks 1 --until-step 4")
    assert "--node-rank" not in RoleArguments(Role.MERGE, 0, Path("p"), "a", Path("c"), Path("t"), lock=0).arguments(1)


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, report(None, Outcome.SUCCEEDED), (Outcome.SUCCEEDED, None)),
        (0, None, (Outcome.SUCCEEDED, None)),
        (EXIT_CODES[FailureClass.USER_DATA], report(FailureClass.USER_DATA), (Outcome.FAILED, FailureClass.USER_DATA)),
        (EXIT_CODES[FailureClass.USER_DATA], None, (Outcome.FAILED, FailureClass.USER_DATA)),
        (40, report(None, Outcome.REFUSED), (Outcome.REFUSED, FailureClass.USER_CONFIG)),
        # A report that claims success while the process failed is left over from before the failure.
        (-signal.SIGKILL, report(None, Outcome.SUCCEEDED), (Outcome.FAILED, FailureClass.INTERNAL)),
        (1, None, (Outcome.FAILED, FailureClass.INTERNAL)),
    ],
)
def test_how_a_role_ended(code, said, expected):
    found = outcome(Role.TRAIN, 0, code, said, Path("train-0.log"))
    assert (found.outcome, found.failure) == expected


SERVER = """
import json, os, subprocess, sys
if sys.argv[1] != "serve":
    print("own process", *sys.argv[1:2])
    sys.exit(5)
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print("imports", flush=True)
BODY
for line in sys.stdin:
    order = json.loads(line)
    role = subprocess.Popen(["sh", "-c", ROLE], start_new_session=True, stdout=open(order["log"], "a"))
    print(json.dumps({"pid": role.pid}), file=answer, flush=True)
    print(json.dumps({"code": role.wait()}), file=answer, flush=True)
"""
"""Stands for the trainer: each role is a shell."""


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]) -> Iterator[Served]:
    # As in a terminal, whatever the tests were started by.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Trainer() as trainer, Interruption(told.append) as interruption:
        yield Served(trainer, interruption, tmp_path, monkeypatch)
    signal.signal(signal.SIGHUP, before)


class Served:
    """Starts roles of a stand-in for the trainer."""

    def __init__(self, trainer: Trainer, interruption: Interruption, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer, self.interruption, self.directory, self.monkeypatch = trainer, interruption, directory, monkeypatch
        self.lock = os.open(directory / "lock", os.O_CREAT)

    def program(self, role: str, body: str = "") -> None:
        text = SERVER.replace("BODY", body).replace("ROLE", repr(role))
        self.monkeypatch.setattr(launch, "_TRAINER", (sys.executable, "-c", text))

    def start(self, role: Role = Role.MERGE) -> launch.Process:
        order = RoleArguments(role, 0, Path("p"), "a", Path("c"), Path("t"), lock=self.lock)
        return self.trainer.start(order, self.directory / f"{role}.log")


def test_roles_are_forks_of_one_process_and_tell_how_they_ended(served: Served, tmp_path: Path):
    served.program("echo $PPID; exit 3")
    parents = []
    for role in (Role.PREFLIGHT, Role.TRAIN, Role.TRAIN):
        with running(served.start(role), served.interruption) as process:
            assert process.wait(60) == process.poll() == 3
        parents.append((tmp_path / f"{role}.log").read_text().split()[-1])
    assert len(set(parents)) == 1
    os.kill(int(parents[0]), 0)
    served.trainer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(parents[0]), 0)


def test_a_role_that_needs_the_network_is_a_process_of_its_own(served: Served, tmp_path: Path):
    served.program("exit 3")
    for role in (Role.FETCH, Role.PUBLISH):
        with running(served.start(role), served.interruption) as process:
            assert process.wait(60) == 5
        assert (tmp_path / f"{role}.log").read_text() == f"own process {role}\n"


def test_signals_reach_the_role_and_leave_the_server_alone(served: Served, tmp_path: Path):
    served.program("trap 'echo saved; exit 43' TERM; echo $PPID; while :; do sleep 0.05; done")
    with running(served.start(), served.interruption) as left, pytest.raises(subprocess.TimeoutExpired):
        left.wait(0.5)
    assert left.poll() == -signal.SIGKILL
    with running(served.start(Role.TRAIN), served.interruption) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.wait(60) == 43
    said = [(tmp_path / f"{role}.log").read_text().split()[-1:] for role in (Role.MERGE, Role.TRAIN)]
    assert said[1] == ["saved"]
    os.kill(int(said[0][0]), 0)


def test_a_trainer_that_dies_ends_its_role_and_the_next_one_gets_another(served: Served, tmp_path: Path):
    served.program("exit 3", body="sys.exit('no torch')")
    process = served.start()
    assert process.wait(60) == 1
    assert (tmp_path / f"{Role.MERGE}.log").read_text() == "imports\nno torch\n"
    served.program("exit 3")
    assert served.start().wait(60) == 3


def test_a_signal_while_the_trainer_imports_ends_it(served: Served):
    served.program("exit 3", body="import time; time.sleep(600)")
    with running(served.start(), served.interruption) as process:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


SAVES_SLOWLY = "trap 'sleep 1.5; echo saved; exit 43' TERM; while :; do sleep 0.05; done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sent_twice_at_once_is_one_and_what_it_does_is_told(
    served: Served, tmp_path: Path, told: list[str], number: signal.Signals
):
    served.program(SAVES_SLOWLY)
    with running(served.start(), served.interruption) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        for _ in range(2):
            os.kill(os.getpid(), number)
        (text,) = told
        assert text.startswith("stopping: ")
        assert "Ctrl-C once more" in text
        assert process.wait(60) == 43
    assert (tmp_path / "merge.log").read_text() == "imports\nsaved\n"


def test_the_second_signal_ends_it_at_once(served: Served, tmp_path: Path, told: list[str]):
    served.program("trap '' TERM; while :; do sleep 0.05; done")
    with running(served.start(), served.interruption) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
        assert process.wait(60) == -signal.SIGKILL
    assert told[1:] == ["ending at once"]


def test_who_was_told_to_ignore_a_hang_up_ignores_it(told: list[str]):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption(told.append) as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interruption.requested
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told == []


WRITES_AFTERWARDS = """
import os
from finetune_cli.local.launch import Interruption
with Interruption() as interruption:
    print("ready", flush=True)
    interruption.pause(30)
    os.write(1, b"more")
    os.write(2, b"more")
raise SystemExit(43 if interruption.requested else 1)
"""


def take_terminal() -> None:
    """As a shell starts a command, whatever the tests were started by."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_terminal_that_is_gone_is_not_written_to():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES_AFTERWARDS],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,  # noqa: PLW1509 - two system calls and no lock
    )
    os.close(theirs)
    assert os.read(ours, 1024).startswith(b"ready")
    os.close(ours)
    assert process.wait(60) == 43


def test_a_hang_up_is_told_where_the_terminal_is_still_there():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", WRITES_AFTERWARDS]
    # What runs the tests may ignore the signal, as nohup has it do.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    signal.signal(signal.SIGHUP, before)
    os.close(theirs)
    shown = os.read(ours, 1024)
    assert shown.startswith(b"ready")
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 43
    with contextlib.suppress(OSError):  # at the end of what a terminal was given
        while more := os.read(ours, 1024):
            shown += more
    os.close(ours)
    assert b"stopping: what runs now saves its state first" in shown
    assert b"more\n" not in shown.replace(b"once more", b"")
    assert not shown.endswith(b"more")


def test_an_end_that_the_user_asked_for_is_no_failure_of_the_product():
    found = outcome(Role.TRAIN, 0, -signal.SIGKILL, None, Path("train-0.log"), interrupted=True)
    assert (found.outcome, found.failure) == (Outcome.FAILED, FailureClass.PREEMPTED)
    assert "at your request" in found.message

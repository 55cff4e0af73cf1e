"""The command of a role, the signals that it gets, and how its end is told."""

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
from finetune_cli.local.launch import Interruption, RoleArguments, outcome, running, trainer_command
from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport
from finetune_job.names import Role
from finetune_trainer.__main__ import parser


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


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]) -> Iterator[Roles]:
    # As in a terminal, whatever the tests were started by.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Interruption(told.append) as interruption:
        yield Roles(interruption, tmp_path, monkeypatch)
    signal.signal(signal.SIGHUP, before)


class Roles:
    """Starts shells in place of the trainer's roles."""

    def __init__(self, interruption: Interruption, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interruption, self.directory, self.monkeypatch = interruption, directory, monkeypatch
        self.log = directory / "role.log"
        self.lock = os.open(directory / "lock", os.O_CREAT)

    def start(self, script: str) -> subprocess.Popen[bytes]:
        """Run a script, which has written "ready" when this returns."""
        self.monkeypatch.setattr(
            launch, "trainer_command", lambda _, *rest: ["sh", "-c", script, *trainer_command("finetune_trainer", *rest)[2:]]
        )
        order = RoleArguments(Role.MERGE, 0, Path("p"), "a", Path("c"), Path("t"), lock=self.lock)
        process = launch.start_role(order, self.log)
        deadline = time.monotonic() + 300
        while not self.log.read_text().startswith("ready"):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return process


def test_a_role_is_told_its_parent_and_holds_the_lock(roles: Roles) -> None:
    held = f"readlink /proc/$$/fd/{roles.lock}"
    with running(roles.start(f'echo ready "$@" $({held}); exit 3'), roles.interruption) as process:
        assert process.wait(60) == 3
    assert roles.log.read_text().startswith(f"ready --parent {os.getpid()} merge ")
    assert roles.log.read_text().endswith(f" {roles.directory / 'lock'}\n")


def test_a_role_that_is_left_is_killed_and_a_signal_reaches_the_next_one(roles: Roles) -> None:
    script = "trap 'echo saved; exit 43' TERM; echo ready; while :; do sleep 0.05; done"
    with running(roles.start(script), roles.interruption) as left:
        pass
    assert left.poll() == -signal.SIGKILL
    with running(roles.start(script), roles.interruption) as process:
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.wait(60) == 43
    assert roles.log.read_text().split()[-1] == "saved"


SAVES_SLOWLY = "trap 'sleep 1.5; echo saved; exit 43' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sent_twice_at_once_is_one_and_what_it_does_is_told(
    roles: Roles, told: list[str], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ONE_SIGNAL_SECONDS", 3600.0)
    with running(roles.start(SAVES_SLOWLY), roles.interruption) as process:
        for _ in range(2):
            os.kill(os.getpid(), number)
        (text,) = told
        assert text.startswith("stopping: ")
        assert "Ctrl-C once more" in text
        assert process.wait(60) == 43
    assert roles.log.read_text() == "ready\nsaved\n"


def test_the_second_signal_ends_it_at_once(roles: Roles, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ONE_SIGNAL_SECONDS", 0.0)
    with running(roles.start("trap '' TERM; echo ready; while :; do sleep 0.05; done"), roles.interruption) as process:
        for _ in range(2):
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
    interruption.pause(300)
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
    shown = b""
    while not shown.endswith(b"\n"):  # a line may come in parts, and the rest of it would have no terminal
        shown += os.read(ours, 1024)
    assert shown == b"ready\r\n"
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
    assert b"stopping: the running stage saves its state first" in shown
    assert b"more\n" not in shown.replace(b"once more", b"")
    assert not shown.endswith(b"more")


def test_an_end_that_the_user_asked_for_is_no_failure_of_the_product():
    found = outcome(Role.TRAIN, 0, -signal.SIGKILL, None, Path("train-0.log"), interrupted=True)
    assert (found.outcome, found.failure) == (Outcome.FAILED, FailureClass.PREEMPTED)
    assert "at your request" in found.message


@pytest.mark.parametrize("role", Role)
def test_a_role_understands_the_command_that_starts_it(role: Role) -> None:
    order = RoleArguments(role, 3, Path("/p/plan.json"), "abc", Path("/c"), Path("/t"), lock=0, restarts=2)
    command = trainer_command("finetune_trainer", *order.arguments(29_400))
    understood = parser().parse_args(command[3:])
    assert (understood.role, understood.attempt, understood.parent) == (role.value, 3, os.getpid())
    assert getattr(understood, "restarts", 2) == 2

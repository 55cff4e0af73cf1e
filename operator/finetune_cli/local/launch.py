"""The trainer as a process of this machine: whether it is installed, one role of the plan, and how signals reach it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_cli.exit_codes import LocalError
from finetune_job.failures import CLASS_OF_EXIT_CODE, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_job.names import Role

POLL_SECONDS = 0.5
"""Between two looks at a process and its progress."""
PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to connections."""
_NEEDED = ("finetune_trainer", "torch")


@dataclass(frozen=True)
class RoleArguments:
    """What a role is told."""

    role: Role
    attempt: int
    plan: Path
    plan_sha256: str
    claims_root: Path
    termination_log: Path
    lock: int
    """Descriptor that the process inherits, so that the job stays taken as long as it lives."""

    def command(self, master_port: int) -> list[str]:
        """Arguments of the process."""
        command = [sys.executable, "-m", "finetune_trainer", self.role.value]
        command += ["--plan", str(self.plan), "--plan-sha256", self.plan_sha256, "--claims-root", str(self.claims_root)]
        command += ["--attempt", str(self.attempt), "--termination-log", str(self.termination_log)]
        if self.role is Role.TRAIN:
            command += [
                "--node-rank",
                "0",
                "--master-address",
                "127.0.0.1",
                "--master-port",
                str(master_port),
                "--observe-port",
                "0",
            ]
        return command


class Interruption:
    """Passes SIGINT and SIGTERM on to the running role as SIGTERM, on which it saves its state; the second time as SIGKILL."""

    def __init__(self) -> None:
        self._request = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._request.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond a signal."""
        self._request.wait(seconds)

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: object) -> None:
        again = self._request.is_set()
        self._request.set()
        if self._process is not None:
            self._send(signal.SIGKILL if again else signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # it may have ended in the meantime
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def watch(self, process: subprocess.Popen[bytes] | None) -> None:
        """Pass signals on to this process from now on."""
        self._process = process
        if process is not None and self.requested:
            self._send(signal.SIGTERM)


@contextlib.contextmanager
def running(command: Sequence[str], interruption: Interruption, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended when the block has. `options`: of `subprocess.Popen`.

    It gets a session of its own, so that a Ctrl-C at the terminal reaches it once, through us.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    interruption.watch(process)
    try:
        yield process
    finally:
        interruption.watch(None)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def launch(order: RoleArguments, log: Path, interruption: Interruption, look: Callable[[], None]) -> TerminationReport:
    """Run a role to its end, calling `look` now and then; how it ended. Its output goes to `log`."""
    order.termination_log.unlink(missing_ok=True)
    with log.open("wb") as output:
        files = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "pass_fds": (order.lock,)}
        with running(order.command(free_port()), interruption, **files) as process:
            while True:
                try:
                    code = process.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    look()
    text = order.termination_log.read_text(errors="replace") if order.termination_log.exists() else ""
    return outcome(order.role, order.attempt, code, parse_envelope(text) if text else None, log)


def outcome(role: Role, attempt: int, code: int, report: TerminationReport | None, log: Path) -> TerminationReport:
    """How a role ended: its own report where that agrees with the exit code, else what the exit code alone says.

    `code`: as `subprocess` gives it, so the negative number of a signal that ended the process.
    """
    if report is not None and (code == 0) == (report.outcome is Outcome.SUCCEEDED):
        if report.failure is None and report.outcome is not Outcome.SUCCEEDED:
            refused = report.outcome is Outcome.REFUSED
            failure = FailureClass.USER_CONFIG if refused else CLASS_OF_EXIT_CODE.get(code, FailureClass.INTERNAL)
            return report.model_copy(update={"failure": failure})
        return report
    if code == 0:
        return TerminationReport(role=role, attempt=attempt, outcome=Outcome.SUCCEEDED)
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return TerminationReport(
        role=role,
        attempt=attempt,
        outcome=Outcome.FAILED,
        failure=CLASS_OF_EXIT_CODE.get(code, FailureClass.INTERNAL),
        message=f"{role} {ended} and left no report",
        hint=f"its output is in {log}",
    )


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now. Raises OSError where there is none.

    It is taken seconds later, by torchrun, and must not be given to a connection meanwhile.
    """
    for port in random.sample(PORTS, k=len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of 127.0.0.1 between {PORTS.start} and {PORTS.stop} is free")


def check_trainer() -> None:
    """Raises LocalError where the trainer is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LocalError(
            f"{missing[0]} is not installed, and this command computes on this machine; install finetune-operator[trainer,cli]"
        )

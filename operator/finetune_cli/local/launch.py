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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from finetune_cli.exit_codes import LocalError
from finetune_job.failures import CLASS_OF_EXIT_CODE, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_job.names import Role

POLL_SECONDS = 0.5
"""Between two looks at a process and its progress."""
PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to connections."""
ONE_SIGNAL_SECONDS = 1.0
"""Signals within this time of the first are the same one: `timeout` and its like send theirs to the process and to its group."""
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TRAINER = (sys.executable, "-m", "finetune_trainer")
_NEEDED = ("finetune_trainer", "torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "jinja2")


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
    ranks: int | None = None
    """That train, if not as many as the plan says."""
    until_step: int | None = None
    """After which training ends with its state saved."""

    @property
    def run(self) -> list[str]:
        """Arguments that all roles of the job have."""
        return ["--plan", str(self.plan), "--plan-sha256", self.plan_sha256, "--claims-root", str(self.claims_root)]

    def arguments(self, master_port: int) -> list[str]:
        """Of this role."""
        arguments = [self.role.value, *self.run, "--attempt", str(self.attempt), "--termination-log", str(self.termination_log)]
        if self.role is Role.TRAIN:
            arguments += [
                "--node-rank",
                "0",
                "--master-address",
                "127.0.0.1",
                "--master-port",
                str(master_port),
                "--observe-port",
                "0",
                *([] if self.ranks is None else ["--ranks", str(self.ranks)]),
                *([] if self.until_step is None else ["--until-step", str(self.until_step)]),
            ]
        return arguments


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    stdout: IO[bytes] | None

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


def start_role(order: RoleArguments, log: Path) -> Process:
    """Start a role as a process that ends with this one; its output goes to `log`."""
    command = [*_TRAINER, *order.arguments(free_port()), "--parent", str(os.getpid())]
    with log.open("wb") as output:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return subprocess.Popen(command, start_new_session=True, pass_fds=(order.lock,), **files)


SAVING = "what runs now saves its state first; Ctrl-C once more ends it at once and loses what it has not saved"
ENDING = "ending at once"


def _tell(text: str) -> None:
    # In a signal's handler: a console may be in the middle of a line, and holds locks.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class Interruption:
    """Passes SIGINT, SIGTERM and SIGHUP on to the running role as SIGTERM, on which it saves its state; later ones as SIGKILL.

    After SIGHUP only that is told, because the terminal is gone, as a rule. A process that was started to ignore it does so.
    """

    def __init__(self, tell: Callable[[str], None] = _tell, *, stopping: str = SAVING) -> None:
        """`tell`: of what a signal leads to, at once; called in its handler. `stopping`: what the first one leads to."""
        self._tell, self._stopping = tell, stopping
        self._request = threading.Event()
        self._requested_at = 0.0
        self._process: Process | None = None
        self._terminals: list[int] = []

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._request.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond a signal."""
        self._request.wait(seconds)

    def __enter__(self) -> Interruption:
        # Only nohup means it: a shell also has its background commands ignore SIGINT.
        is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        taken = [number for number in _STOPPING_SIGNALS if number != signal.SIGHUP or not is_kept]
        # Asked now: one that is gone is no terminal any more.
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if not self._request.is_set():
            self._requested_at = now
            self._request.set()
            self._tell(f"stopping: {self._stopping}")
            self._send(signal.SIGTERM)
        elif now - self._requested_at >= ONE_SIGNAL_SECONDS:
            self._tell(ENDING)
            self._send(signal.SIGKILL)
        if number == signal.SIGHUP:
            _leave(self._terminals)

    def _send(self, number: int) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # it may have ended in the meantime
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def watch(self, process: Process | None) -> None:
        """Pass signals on to this process from now on."""
        self._process = process
        if process is not None and self.requested:
            self._send(signal.SIGTERM)


def _leave(terminals: Sequence[int]) -> None:
    """Writing to a terminal that is gone is an error, at which the command would end before its role."""
    for stream in terminals:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)


AnyProcess = TypeVar("AnyProcess", bound=Process)


@contextlib.contextmanager
def running(process: AnyProcess, interruption: Interruption) -> Iterator[AnyProcess]:
    """A process that has ended when the block has. It leads a session, so that a Ctrl-C reaches it once, through us."""
    interruption.watch(process)
    try:
        yield process
    finally:
        interruption.watch(None)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def launch(order: RoleArguments, log: Path, interruption: Interruption, look: Callable[[], None]) -> TerminationReport:
    """Run a role to its end, calling `look` now and then; how it ended. Its output goes to `log`."""
    order.termination_log.unlink(missing_ok=True)
    with running(start_role(order, log), interruption) as process:
        while True:
            try:
                code = process.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                look()
    text = order.termination_log.read_text(errors="replace") if order.termination_log.exists() else ""
    report = parse_envelope(text) if text else None
    return outcome(order.role, order.attempt, code, report, log, interrupted=interruption.requested)


def outcome(
    role: Role, attempt: int, code: int, report: TerminationReport | None, log: Path, *, interrupted: bool = False
) -> TerminationReport:
    """How a role ended: its own report if that agrees with the exit code, else what the exit code alone says.

    `code`: as `subprocess` gives it, so the negative number of a signal that ended the process. `interrupted`: by the user.
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
    if interrupted:
        message = f"{role} {ended} at your request; the next run continues from what it had saved"
        return TerminationReport(
            role=role, attempt=attempt, outcome=Outcome.FAILED, failure=FailureClass.PREEMPTED, message=message
        )
    return TerminationReport(
        role=role,
        attempt=attempt,
        outcome=Outcome.FAILED,
        failure=CLASS_OF_EXIT_CODE.get(code, FailureClass.INTERNAL),
        message=f"{role} {ended} and left no report",
        hint=f"its output is in {log}",
    )


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now. Raises OSError if there is none.

    It is taken seconds later, by torchrun, and must not be given to a connection meanwhile.
    """
    for port in random.sample(PORTS, k=len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of 127.0.0.1 between {PORTS.start} and {PORTS.stop} is free")


def check_trainer() -> None:
    """Raises LocalError if the trainer is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LocalError(
            f"{missing[0]} is not installed, and this command computes on this machine; install finetune-operator[trainer,cli]"
        )

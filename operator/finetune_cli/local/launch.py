"""Runs the trainer as a process on this machine: checks that it is installed, starts one role, and passes signals to it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_cli.exit_codes import LocalError
from finetune_job.failures import CLASS_OF_EXIT_CODE, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_job.names import Role

POLL_SECONDS = 0.5
"""Seconds between two checks of a process and its progress."""
PORTS = range(20_000, 32_000)
"""Ports to choose from, below those that the kernel assigns to connections."""
ONE_SIGNAL_SECONDS = 1.0
"""Signals within this time after the first count as the same one: programs like `timeout` signal a process and its group."""
PAUSE_SECONDS = 0.1
"""Maximum time between a signal and the end of a pause."""
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NEEDED = ("finetune_trainer", "torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "jinja2")


@dataclass(frozen=True)
class RoleArguments:
    """The command-line arguments of a role's process."""

    role: Role
    attempt: int
    plan: Path
    plan_sha256: str
    claims_root: Path
    termination_log: Path
    lock: int
    """Descriptor of the lock, which the process inherits, so that the job stays locked as long as the process lives."""
    ranks: int | None = None
    """Number of ranks that train; None: the plan's number."""
    until_step: int | None = None
    """Step after which training saves its state and ends."""
    restarts: int = 0
    """How often the supervisor of training may restart its ranks."""

    def arguments(self, master_port: int) -> list[str]:
        """Return the arguments of the role's process."""
        options: dict[str, object] = {
            "plan": self.plan,
            "plan-sha256": self.plan_sha256,
            "claims-root": self.claims_root,
            "attempt": self.attempt,
            "termination-log": self.termination_log,
        }
        if self.role is Role.TRAIN:
            options |= {"node-rank": 0, "master-address": "127.0.0.1", "master-port": master_port, "observe-port": 0}
            options |= {"ranks": self.ranks, "until-step": self.until_step, "restarts": self.restarts or None}
        words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        return [self.role.value, *words]


def trainer_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a trainer program that ends when this process ends.

    The module is only named and not imported, because the trainer may not be installed.
    """
    return [sys.executable, "-m", module, "--parent", str(os.getpid()), *arguments]


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process as the leader of a new session, so that Ctrl-C reaches it once, through `Interruption`."""
    return subprocess.Popen(command, start_new_session=True, **{"stdin": subprocess.DEVNULL, **options})


def start_role(order: RoleArguments, log: Path) -> subprocess.Popen[bytes]:
    """Start the process of a role; its output goes to `log`."""
    command = trainer_command("finetune_trainer", *order.arguments(free_port()))
    with log.open("wb") as output:
        return start(command, stdout=output, stderr=output, pass_fds=(order.lock,))


SAVING = "the running stage saves its state first; Ctrl-C once more kills it at once, and what it has not saved is lost"
ENDING = "ending at once"


def _report(text: str) -> None:
    # This runs in a signal handler, while a console may be in the middle of a line and hold locks.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class Interruption:
    """Passes the first SIGINT, SIGTERM or SIGHUP on as SIGTERM, so that the running role saves its state; later ones as SIGKILL.

    After SIGHUP nothing is written to terminals, which are usually gone. If SIGHUP was ignored at the start, it stays ignored.
    """

    def __init__(self, report: Callable[[str], None] = _report, *, stopping: str = SAVING) -> None:
        """report: called in the signal handler with the signal's effect. stopping: the effect of the first signal, in words."""
        self._report, self._stopping = report, stopping
        self._is_requested = False
        self._requested_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._terminals: list[int] = []

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._is_requested

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until a signal arrives."""
        # No Event is used: if a signal arrived while this thread held the Event's lock, the handler would wait for it forever.
        deadline = time.monotonic() + seconds
        while not self._is_requested and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, PAUSE_SECONDS))

    def __enter__(self) -> Interruption:
        # An ignored SIGHUP is intentional, as with nohup. An ignored SIGINT is not: shells ignore it for background commands.
        is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        taken = [number for number in _STOPPING_SIGNALS if number != signal.SIGHUP or not is_kept]
        # This is checked now, because isatty returns False for a terminal that is gone.
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if not self._is_requested:
            self._requested_at = now
            self._is_requested = True
            self._report(f"stopping: {self._stopping}")
            self._send(signal.SIGTERM)
        elif now - self._requested_at >= ONE_SIGNAL_SECONDS:
            self._report(ENDING)
            self._send(signal.SIGKILL)
        if number == signal.SIGHUP:
            # Writing to a terminal that is gone would end the command before its role, so the output is discarded.
            for stream in self._terminals:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)

    def _send(self, number: int) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # the process may have ended in the meantime
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
def running(process: subprocess.Popen[bytes], interruption: Interruption) -> Iterator[subprocess.Popen[bytes]]:
    """Pass signals on to a process; if it still runs at the end of the block, kill it and its children."""
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


def answer_of(
    command: Sequence[str], interruption: Interruption | None = None, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a process until it ends, and return what it printed. given: content of its standard input."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with running(start(command, **pipes), interruption or Interruption()) as process:
        answer, errors = process.communicate(given)
    return subprocess.CompletedProcess(command, process.returncode, answer, errors)


def launch(order: RoleArguments, log: Path, interruption: Interruption, look: Callable[[], None]) -> TerminationReport:
    """Run a role until it ends, call `look` regularly, and return how the role ended. The role's output goes to `log`."""
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
    """Return how a role ended: its own report if that agrees with the exit code, else what the exit code alone says.

    `code`: exit code, or negative number of the signal that killed the process. `interrupted`: whether the user stopped it.
    """
    if report is not None and (code == 0) == (report.outcome is Outcome.SUCCEEDED):
        if report.failure is None and report.outcome is not Outcome.SUCCEEDED:
            refused = report.outcome is Outcome.REFUSED
            failure = FailureClass.USER_CONFIG if refused else CLASS_OF_EXIT_CODE.get(code, FailureClass.INTERNAL)
            return report.model_copy(update={"failure": failure})
        return report
    if code == 0:
        return TerminationReport(role=role, attempt=attempt, outcome=Outcome.SUCCEEDED)
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    failure, hint = CLASS_OF_EXIT_CODE.get(code, FailureClass.INTERNAL), f"its output is in {log}"
    message = f"{role} {ended} and left no report"
    if interrupted:
        failure, hint = FailureClass.PREEMPTED, ""
        message = f"{role} {ended} at your request; the next run continues from its last save"
    return TerminationReport(role=role, attempt=attempt, outcome=Outcome.FAILED, failure=failure, message=message, hint=hint)


def free_port() -> int:
    """Find a port of the loopback interface that no process uses. Raises OSError if there is none.

    torchrun binds the port seconds later; until then, the kernel must not assign it to a connection.
    """
    for port in random.sample(PORTS, k=len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of 127.0.0.1 between {PORTS.start} and {PORTS.stop} is free")


def check_trainer() -> None:
    """Check that the trainer is installed. Raises LocalError."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LocalError(
            f"{missing[0]} is not installed, and this command computes on this machine; install finetune-operator[trainer,cli]"
        )

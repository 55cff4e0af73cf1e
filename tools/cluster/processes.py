"""Starts, checks and ends the test cluster's processes."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.errors import ClusterError

_LOG_TAIL_LINES = 25
_END_SECONDS = 30.0
"""Limit for the end of a killed process, for a machine that is short of CPU or disk; usually it ends at once."""


@dataclass(frozen=True)
class Component:
    """A running process of the cluster, which leads its own process group."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check_running(self) -> None:
        """Raise ClusterError with the end of the log if the process has ended by itself."""
        code = self.process.poll()
        if code is not None:
            raise ClusterError(f"{self.name} ended with exit code {code}; {log_tail(self.log)}")

    def pause(self) -> None:
        """Pause the process: its clients wait."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused process."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and its group, and wait until the process is gone."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_END_SECONDS)


def start_component(name: str, command: Sequence[str | Path], log: Path) -> Component:
    """Start a process in its own process group. Its output is appended to `log`.

    The kernel kills it when the calling thread ends, for whatever reason, so that an aborted test run leaves no server
    behind.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=without_proxies(os.environ),
            start_new_session=True,
        )
    return Component(name, process, log)


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without proxy settings: a proxy cannot reach addresses that exist only here."""
    return {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}


def run_command(*command: str | Path, stdin: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        ClusterError: the command is not installed, or ended with a non-zero exit code.
    """
    arguments = [str(argument) for argument in command]
    try:
        done = subprocess.run(arguments, input=stdin, capture_output=True, text=True, env=environment, check=False)
    except FileNotFoundError as error:
        raise ClusterError(f"the program {arguments[0]} is not installed") from error
    if done.returncode != 0:
        shown = " ".join(arguments)
        raise ClusterError(f"exit code {done.returncode} from: {shown}\n{done.stderr.strip()}\n{done.stdout.strip()}")
    return done.stdout


def log_tail(log: Path) -> str:
    """Return the end of a log with its path, for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"end of {log}:", *(f"    {line}" for line in lines[-_LOG_TAIL_LINES:])])

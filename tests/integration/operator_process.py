"""The operator as a process of its own, as the chart runs it, reaching the API server with the chart's ServiceAccount."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tests.support.forked_program import ForkedProgram
from tools.cluster.errors import wait_until

DEADLINE = 120.0


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, number: int, /) -> None: ...


class OperatorProcess:
    """Context manager: a running operator; whatever is left of it is killed at the end."""

    def __init__(self, kubeconfig: Path, log: Path, *arguments: str) -> None:
        self._kubeconfig = kubeconfig
        self.log = log
        self._arguments = arguments

    def __enter__(self) -> OperatorProcess:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.kill()
        if error is not None:
            error.add_note(f"{self.log}:\n{self.log.read_text()[-8000:]}")

    def start(self) -> None:
        """Start it (again)."""
        self._read_from = self.log.stat().st_size if self.log.exists() else 0
        arguments = ("--listen-address=127.0.0.1", "--listen-port=0", *self._arguments)
        # What a killed one leaves is removed with the log.
        own = {"KUBECONFIG": str(self._kubeconfig), "TMPDIR": str(self.log.parent)}
        self.process = self._launch(arguments, {**os.environ, **own}, self.log)

    def _launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        with log.open("ab") as output:
            command = [sys.executable, "-m", "finetune_operator", *arguments]
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def kill(self) -> None:
        """SIGKILL: it gets no chance to tidy up."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)

    def lines(self, event: str = "") -> list[dict[str, Any]]:
        """Log lines since the last start, or those of one event. What is not JSON is a failure."""
        with self.log.open("rb") as file:
            file.seek(self._read_from)
            complete = file.read().decode().split("\n")[:-1]
        parsed = [json.loads(line) for line in complete]
        return [line for line in parsed if event in ("", line["event"])]

    def wait_for_line(self, event: str) -> dict[str, Any]:
        """Wait for a log line."""

        def written() -> list[dict[str, Any]]:
            assert self.process.poll() is None, f"the operator ended with {self.process.returncode}: {self.log.read_text()}"
            return self.lines(event)

        return wait_until(written, f"{event!r} in {self.log}", DEADLINE)[0]

    def fetch(self, path: str) -> tuple[int, str]:
        """Status and text of one of its endpoints."""
        port = self.wait_for_line("listening")["port"]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read().decode()


class ForkedOperator(OperatorProcess):
    """The same, forked from a process that has imported it: for tests that measure neither its start nor its memory."""

    def _launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        return ForkedProgram("finetune_operator", arguments, environment, log)

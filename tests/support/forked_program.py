"""Programs of the operator, forked from a process that has imported them once: to start Python with all their modules costs more
than what most tests do with them. The end-to-end tests start them as pods do.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ("finetune_operator.app", "prometheus_client.parser")
"""What the programs import, and not themselves: they are executed as `__main__`."""
_SECONDS = 120.0


class ForkedProgram:
    """`python -m MODULE ARGUMENTS`, with what is used of `subprocess.Popen`."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        """`output`: what it prints is added to this file."""
        output.touch()
        _SERVER.set_forkserver_preload([*_PRELOADED, __name__])
        self._module = module
        self._process: BaseProcess = _SERVER.Process(target=_run, args=(module, list(arguments), dict(environment), str(output)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Negative: the signal."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._module, timeout or 0.0)
        return code

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def send_signal(self, number: int, /) -> None:
        """Does nothing once it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)


def run_forked(module: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with variables in addition to the environment; standard output and error come together."""
    with tempfile.NamedTemporaryFile() as output:
        path = Path(output.name)
        program = ForkedProgram(module, [str(one) for one in arguments], {**os.environ, **variables}, path)
        try:
            code = program.wait(_SECONDS)
        finally:
            program.kill()
        return subprocess.CompletedProcess([module, *map(str, arguments)], code, path.read_text(), "")


def _run(module: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

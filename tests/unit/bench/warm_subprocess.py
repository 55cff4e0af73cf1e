"""What benchmarks use of `subprocess`, for `python -m MODULE ARGUMENTS`: with forks of a process that has imported the libraries.

Each of them would import torch again, which takes longer than all that a toy does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, PIPE
from typing import IO, Any

from tests.support.forked_ranks import PRELOADED

__all__ = ["DEVNULL", "PIPE", "Popen", "run"]
_SERVER = multiprocessing.get_context("forkserver")


class Popen:
    """The program, started."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> None:
        interpreter, option, module, *arguments = command
        assert (interpreter, option) == (sys.executable, "-m")
        _SERVER.set_forkserver_preload(list(PRELOADED))
        # Open as long as this is: the program opens them by their numbers here.
        self._files = (stdout, stderr)
        outputs = [_path(file) for file in self._files]
        self._process = _SERVER.Process(target=_run, args=(module, arguments, dict(env or os.environ), outputs))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def run(command: Sequence[str], *, check: bool, stdout: int, text: bool = False, **others: Any) -> Any:
    """To its end."""
    assert check
    with tempfile.NamedTemporaryFile("r") as said:
        program = Popen(command, stdout=said if stdout == PIPE else stdout, **others)
        if code := program.wait():
            raise subprocess.CalledProcessError(code, list(command))
        assert text or stdout != PIPE
        return subprocess.CompletedProcess(list(command), 0, said.read())


def _path(file: IO[bytes] | int | None) -> str | None:
    """By which a process that is no child of this one opens it."""
    return os.devnull if file == DEVNULL else None if file is None else f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _run(module: str, arguments: list[str], environment: dict[str, str], outputs: list[str | None]) -> None:
    for standard, path in enumerate(outputs, start=1):
        if path is not None:
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), standard)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

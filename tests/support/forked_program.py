"""Programs of the operator and commands of users, forked from a process that has imported them once: to start Python with all
their modules costs more than what most tests do with them. The end-to-end tests start them as pods and users do.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from kubernetes.config import kube_config

_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ("finetune_operator.app", "prometheus_client.parser", "finetune_cli.app", "finetune_cli.commands.inspect_jobs")
"""Modules that the programs import. The programs themselves are executed as `__main__`."""
_SECONDS = 120.0


class ForkedProgram:
    """`python -m MODULE ARGUMENTS`, with what is used of `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        directory: Path | None = None,
    ) -> None:
        """`output`, `errors`: files to which what it prints is added; both to the first if there is one only."""
        files = [output, errors or output]
        for file in files:
            file.touch()
        _SERVER.set_forkserver_preload([*_PRELOADED, __name__])
        self._module = module
        started = (module, list(arguments), dict(environment), [str(file) for file in files], str(directory or Path.cwd()))
        self._process: BaseProcess = _SERVER.Process(target=_run, args=started)
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


def run_forked(
    module: str, *arguments: str | Path, directory: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in a directory, with variables in addition to the environment."""
    with tempfile.TemporaryDirectory() as scratch:
        output, errors = Path(scratch) / "output", Path(scratch) / "errors"
        words = [str(one) for one in arguments]
        program = ForkedProgram(module, words, {**os.environ, **variables}, output, errors, directory)
        try:
            code = program.wait(_SECONDS)
        finally:
            program.kill()
        return subprocess.CompletedProcess([module, *words], code, output.read_text(), errors.read_text())


def _run(module: str, arguments: list[str], environment: dict[str, str], files: list[str], directory: str) -> None:
    for standard, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), standard)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    # Read when they were imported.
    tempfile.tempdir = None
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = environment.get("KUBECONFIG", kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
    sys.argv = [module, *arguments]
    # A forked process ends without what a program registers for its end: the client's copies of keys would stay.
    atexit._clear()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()

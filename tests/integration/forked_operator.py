"""An operator that is forked from a process which has imported it once: to start Python with all its modules costs more than what
most tests do with it. The end-to-end tests start it as a pod does.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.integration.operator_process import OperatorProcess

_PROGRAM = "finetune_operator.__main__"
_SERVER = multiprocessing.get_context("forkserver")


class ForkedOperator(OperatorProcess):
    """The same program as a process of its own, with its own arguments, environment and log."""

    def _launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> _Forked:
        log.touch()
        _SERVER.set_forkserver_preload([_PROGRAM, __name__])
        process = _SERVER.Process(target=_run, args=(list(arguments), dict(environment), str(log)))
        process.start()
        return _Forked(process)


class _Forked:
    """What `subprocess.Popen` has, of a forked process."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(_PROGRAM, timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [_PROGRAM, *arguments]
    from finetune_operator.__main__ import main

    sys.exit(main())

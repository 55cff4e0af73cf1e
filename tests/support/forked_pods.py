"""Programs of the trainer as pods run them, forked from a process that has imported what a supervisor imports.

To import it takes each of them longer than what most tests do with it. That process touches no device, so ranks are forked from
its forks as they are in a pod. `python -m tests.support.forked_pods` is that process.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from finetune_trainer.processes.start import die_with

LOOK_SECONDS = 0.05
_PACKS = "packs"


class PodServer:
    """Starts them. As a context it ends, and they with it. Several threads may use it."""

    def __init__(self, errors: IO[bytes] | None = None, *, packs: bool = False) -> None:
        """errors: takes what they say on standard error; None: this process's own does. packs: whether some may pack their base:
        they import bitsandbytes, and PEFT which has to find it, each by itself.
        """
        self._asking = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *([_PACKS] if packs else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
        )

    def start(self, module: str, arguments: Sequence[object], variables: Mapping[str, str] | None = None) -> ForkedPod:
        """`python -m module arguments`, as the leader of a session; what it prints is lost."""
        return ForkedPod(self, self.ask(start=[module, [str(one) for one in arguments], dict(variables or {})]))

    def ask(self, **order: Any) -> Any:
        """What the process answers to one order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            self._process.stdin.write(json.dumps(order) + "\n")
            return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


class ForkedPod:
    """One of them, with what is used of `subprocess.Popen`."""

    def __init__(self, server: PodServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The exit code, once it has ended; negative: the signal."""
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(LOOK_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Does nothing once it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            answer: int | None = _fork(*order["start"])
        else:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)


def _fork(module: str, arguments: list[str], variables: dict[str, str]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(server)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(nothing, standard)
        os.environ.update(variables)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from finetune_trainer.processes.start import compile_conversions, keep_bitsandbytes_out, preload
    from finetune_trainer.roles.train import LIBRARIES

    if _PACKS in sys.argv[1:]:
        preload("torch.distributed.run", "transformers")
    else:
        keep_bitsandbytes_out()
        preload(*LIBRARIES)
    compile_conversions()
    _serve()

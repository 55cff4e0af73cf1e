"""`python -m bench.gpu.check [TIER...]`: what only a GPU can show of the trainer, in tiers that stand alone.

A tier that fails, hangs or ends its process stops no other: all run in another process (bench/gpu/worker.py), which is ended with
all that it started if a tier takes longer than it may, and started again with those that are left. On a device they have
--minutes together; what these leave out is named. With a GPU each tier writes its figures to bench/results/gpu/TIER.json. Without
one the same code runs at toy size on the CPU, so that it starts at the first try where there is one, and each tier says what was
not shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import psutil

WORKER = (sys.executable, "-m", "bench.gpu.worker")
"""Called with the number of a file descriptor, which it reports to, and the names of tiers."""
MINUTES = 10.0
START_SECONDS = 300.0
"""Until the libraries are imported."""
END_SECONDS = 10.0
"""For the process after its last tier."""
MODELS = "GPU_CHECK_MODELS"
"""Variable with the folder in which the models of benchmarks stay from tier to tier, 16 GB."""


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 if every tier passed that there was time for, and there was for one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiers", nargs="*", help="all, unless some are named", metavar="TIER")
    parser.add_argument("--toy", action="store_true", help="on the CPU at toy size, also if there is a GPU")
    parser.add_argument("--quick", action="store_true", help="of each tier only what is cheapest")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all tiers together on a device (10)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gpu-check-models-") as models:
        environment = {**os.environ, MODELS: models, **({"CUDA_VISIBLE_DEVICES": ""} if arguments.toy else {})}
        return check(arguments.tiers, ["--quick"] if arguments.quick else [], environment, arguments.minutes * 60)


def check(names: Sequence[str], options: Sequence[str], environment: dict[str, str], seconds: float) -> int:
    """Run the tiers, all if none is named, each within its own limit and all within `seconds`."""
    began, num_run, failed = time.monotonic(), 0, []
    left: list[str] | None = None
    while left is None or left:
        # Options come last: argparse takes no more names after one.
        worker = Worker([*(names if left is None else left), *options], environment)
        try:
            plan = worker.report(START_SECONDS)
            if "problem" in plan:
                print(f"tiers cannot run: {plan['problem']}")
                return 1
            left, limits = list(plan["limits"]), plan["limits"]
            end = began + seconds if plan["on_device"] else float("inf")
            while left and time.monotonic() < end:
                limit = min(limits[left[0]], end - time.monotonic())
                found = worker.report(limit)
                if found.get("is_late") and limit < limits[left[0]]:
                    break
                name, num_run = left.pop(0), num_run + 1
                if found["problem"]:
                    failed.append(name)
                if "tier" not in found:
                    print(f"{name}: FAILED: {found['problem']}", flush=True)
                    break
            if left and time.monotonic() >= end:
                break
        finally:
            worker.end(patience=0.0 if left else END_SECONDS)
    if left:
        print(f"left out, because {seconds / 60:g} minutes are over: {', '.join(left)}")
        print(f"they run with: python -m bench.gpu.check {' '.join(left)}")
    print(f"failed: {', '.join(failed)}" if failed else f"{num_run - len(failed)} of {num_run + len(left)} tiers passed")
    return int(bool(failed) or not num_run)


class Worker:
    """The process that runs tiers, one after another, and reports after each."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._reports, writer = Pipe(duplex=False)
        command = [*WORKER, str(writer.fileno()), *arguments]
        # A session of its own: what it has started is known by that, also after it has ended.
        self._process = subprocess.Popen(command, env=environment, pass_fds=[writer.fileno()], start_new_session=True)
        self._ends = os.pidfd_open(self._process.pid)
        writer.close()

    def report(self, seconds: float) -> dict[str, Any]:
        """The next one; if none comes within `seconds`, or no more, a `problem` alone."""
        ready = wait([self._reports, self._ends], timeout=seconds)
        if not ready:
            return {"problem": f"not done after {seconds:.0f} s", "is_late": True}
        if self._reports.poll():
            with suppress(EOFError):
                found: dict[str, Any] = json.loads(self._reports.recv_bytes())
                return found
        return {"problem": f"its process ended with {self._process.wait()}"}

    def end(self, patience: float) -> None:
        """With all that it has started, if it does not end by itself within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        found: set[psutil.Process] = set()
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(self._process.pid)
            found = {main, *main.children(recursive=True)}
        for process in {*found, *filter(self._is_of_session, psutil.process_iter())}:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        os.close(self._ends)
        self._reports.close()

    def _is_of_session(self, process: psutil.Process) -> bool:
        with suppress(ProcessLookupError, PermissionError):
            return os.getsid(process.pid) == self._process.pid
        return False


def reporter(descriptor: int) -> Connection:
    """The worker's end of what `Worker` reads."""
    return Connection(descriptor, readable=False)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.starts --ranks 8 --runs 100`: start gangs of the real `train` role for one step, and count those that hang.

Each run is `python -m finetune_trainer train` on a tiny Llama with LoRA and gloo, in a session of its own. A run that has not
ended after `--seconds` counts as hung: the native stacks of its processes are printed where gdb is installed, then they are
killed.
With `--at-a-time 5` the gangs are each other's load, which is measured and printed. The exit code is 1 if a run hung or failed.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from finetune_cli.local.launch import free_port
from finetune_trainer.context import RunContext
from tests.support.tiny_model import run_context, tiny_spec

STACK_SECONDS = 60.0
"""For one process. The debugger reads a gigabyte of symbols first."""
MOST_SHOWN = 2
"""Hung gangs of which stacks are printed."""
PROGRESS = 50
TRAINED, HUNG = "trained", "hung"
_starting = threading.Lock()


def context_of_one_step(claims: Path, num_ranks: int) -> RunContext:
    """Claims with model and prepared data, and a plan that trains a single step on this many ranks."""
    training = {"maxSteps": 1, "globalBatchSize": num_ranks, "microBatchSize": 1}
    return run_context(claims, tiny_spec(training=training, parallelism={"processesPerNode": num_ranks}))


def train_arguments(context: RunContext) -> list[str]:
    """The arguments of the role for this attempt, as a pod of a gang of one node has them."""
    arguments = {
        "--plan": context.workspace.root / "plan.json",
        "--plan-sha256": context.plan_sha256,
        "--claims-root": context.claims_root,
        "--attempt": context.attempt,
        "--termination-log": context.claims_root / "termination.json",
        "--master-port": free_port(),
        "--observe-port": 0,
    }
    return ["train", *(str(part) for pair in arguments.items() for part in pair)]


def print_stacks(pid: int) -> None:
    """Print the stack of the main thread of a process and of all its children, as a debugger shows them."""
    if shutil.which("gdb") is None:
        return
    for member in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        command = ["gdb", "-p", str(member.pid), "-batch", "-ex", "set pagination off", "-ex", "bt 12"]
        with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
            print(f"--- {member.pid} {member.name()}")
            shown = subprocess.run(command, check=False, capture_output=True, text=True, timeout=STACK_SECONDS).stdout
            print("\n".join(line[:160] for line in shown.splitlines() if line.startswith("#")), flush=True)


def one_start(
    pristine: RunContext, directory: Path, options: argparse.Namespace, hung: list[int], number: int
) -> tuple[str, float]:
    """How one gang ended (`trained`, `hung`, or `failed with ...`), and after how many seconds."""
    context = replace(pristine, claims_root=directory / f"run-{number}")
    shutil.copytree(pristine.claims_root, context.claims_root)
    log = directory / f"log-{number}"
    began = time.monotonic()
    # Two that look for a free port at the same time could choose the same one.
    with log.open("wb") as output, _starting:
        command = [sys.executable, "-m", "finetune_trainer", *train_arguments(context)]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    with process:
        try:
            code = process.wait(options.seconds)
            end = TRAINED if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            end = HUNG
            hung.append(number)
            if len(hung) <= MOST_SHOWN:
                print_stacks(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - began
    if end != TRAINED:
        print(
            f"run {number} of {options.runs} {end} after {seconds:.1f} s\n{log.read_text(errors='replace')[-3000:]}", flush=True
        )
    shutil.rmtree(context.claims_root, ignore_errors=True)
    return end, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.starts", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--at-a-time", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=400.0, help="after which a run counts as hung")
    options = parser.parse_args(arguments)
    loads: list[float] = []
    with tempfile.TemporaryDirectory(prefix="starts-") as name, ThreadPoolExecutor(options.at_a_time) as threads:
        directory = Path(name)
        start = partial(one_start, context_of_one_step(directory / "claims", options.ranks), directory, options, [])
        results = []
        for result in threads.map(start, range(options.runs)):
            results.append(result)
            loads.append(os.getloadavg()[0])
            if len(results) % PROGRESS == 0:
                print(f"{len(results)} of {options.runs} have ended", flush=True)
    ends = Counter(end for end, _ in results)
    durations = [seconds for _, seconds in results]
    told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(
        f"{options.runs} starts with {options.ranks} ranks, {options.at_a_time} at a time: {told}; seconds: median "
        f"{statistics.median(durations):.1f}, longest {max(durations):.1f}; load: median {statistics.median(loads):.1f}"
    )
    return 0 if set(ends) == {TRAINED} else 1


if __name__ == "__main__":
    sys.exit(main())

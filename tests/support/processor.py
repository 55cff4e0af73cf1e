"""How slow this machine is at this moment, so that a budget of processor time fails for slow code and not for a slow machine."""

import json
import math
import os
import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

FIRST_ANSWER_SECONDS = 2.0
"""Processor time within which a command answers what is wrong with a manifest, its records and its places. Plain imports take
half a second, and a thousand chats a second more; `slowness` does not see what other tests take of the processor's caches.
"""
ATTEMPTS = 4
"""A process whose files are in no cache takes longer."""
_NOMINAL_SECONDS = 0.05
"""Processor time of the piece of work below on the machine for which budgets are written."""
_WORK = {f"field{number}": ["text" * 4, number, {"inner": [number] * 8}] for number in range(4_000)}


def run_timed(
    command: Sequence[str], *, cwd: Path, without: Sequence[str], traps: Path, enough: float = math.inf
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command that may not import the modules `without`, each of which would end it with the exit code 99.

    What it did, and its seconds of processor time, children included: the least of some attempts if the first is too slow.
    traps: a directory for what takes the place of the modules. enough: seconds below which there is no other attempt.
    """
    for name in without:
        (traps / name).mkdir(parents=True, exist_ok=True)
        (traps / name / "__init__.py").write_text("import os\nos._exit(99)\n")
    environment = {**os.environ, "PYTHONPATH": f"{traps}:{os.environ.get('PYTHONPATH', '')}"}
    # Users have compiled modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    least = math.inf
    for _ in range(ATTEMPTS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if least < enough:
            break
    return done, least


def slowness() -> float:
    """Return how many times longer a fixed piece of work takes than on that machine; 1 on a faster one."""
    taken = min(_once() for _ in range(3))
    return max(1.0, taken / _NOMINAL_SECONDS)


def _once() -> float:
    start = time.process_time()
    text = json.dumps(_WORK)
    read = json.loads(text)
    sum(len(key) + len(value) for key, value in read.items())
    sorted(read, key=lambda key: (len(key), key[::-1]))
    return time.process_time() - start

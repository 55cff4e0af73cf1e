"""A library at work on a user's file, in a forked process with bounds: one that runs for ever or eats memory is a finding.

Forked, because it has to import nothing then: a hundredth of a second instead of two.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from select import select
from typing import NoReturn

from finetune_job.rules.rule import Finding

CPU_SECONDS = 300
"""Of a call. The slowest honest one, converting an old sentencepiece vocabulary of 256,000 pieces, takes about a minute."""
WALL_SECONDS = 1800.0
"""On a machine that gives a process a sixth of a CPU."""
DATA_BYTES = 4 << 30
"""Memory that a call may take beside what is held already. The largest honest tokenizers take less than 1 GiB."""
_READ_BYTES = 1 << 16


class EndedError(Exception):
    """The process was ended by its bounds, or by the library itself. The message says which."""


def confined(work: Callable[[], list[Finding]]) -> list[Finding]:
    """What `work` finds; it changes nothing in this process. Raises EndedError."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(work, writing)
    os.close(writing)
    ended = ""
    try:
        said = _read_all(reading, time.monotonic() + WALL_SECONDS)
        if said is None:
            ended = f"did not end within {WALL_SECONDS:.0f} s"
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if said and code == 0:
        found: list[Finding] = pickle.loads(said)  # noqa: S301 - written by this program
        return found
    raise EndedError(ended or how_it_ended(code))


def limit_this_process() -> None:
    """Bound CPU time and memory from here on, for this process alone."""
    held = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(held.ru_utime + held.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, _lowered(resource.RLIMIT_CPU, spent + CPU_SECONDS))
    limit_memory()


def limit_memory() -> None:
    """Bound memory alone: what asks for more gets a MemoryError, or ends the process."""
    resource.setrlimit(resource.RLIMIT_DATA, _lowered(resource.RLIMIT_DATA, _data_bytes() + DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def how_it_ended(code: int) -> str:
    """A status of waitpid in words; negative: the signal."""
    if code == -signal.SIGXCPU:
        return f"takes more than {CPU_SECONDS} s of CPU time"
    if code in (-signal.SIGKILL, -signal.SIGABRT):
        return f"takes more memory than there is, or than {DATA_BYTES >> 30} GiB ({signal.Signals(-code).name})"
    return f"ends the process ({signal.Signals(-code).name})" if code < 0 else f"ends the process with status {code}"


def _work(work: Callable[[], list[Finding]], writing: int) -> NoReturn:
    status = 1
    try:
        limit_this_process()
        said = pickle.dumps(work())
        with os.fdopen(writing, "wb") as answer:
            answer.write(said)
        status = 0
    except BaseException as error:  # noqa: BLE001 - nothing of the parent's may run on in the child
        print(f"a confined check failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _read_all(descriptor: int, deadline: float) -> bytes | None:
    """Everything until the other end closes, or None at the deadline."""
    blocks: list[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select([descriptor], [], [], left)[0]:
            return None
        block = os.read(descriptor, _READ_BYTES)
        if not block:
            return b"".join(blocks)
        blocks.append(block)


def _data_bytes() -> int:
    """Private memory of this process that can be written, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _lowered(which: int, wanted: int) -> tuple[int, int]:
    """Soft and hard limit, never above what is set already."""
    soft, hard = resource.getrlimit(which)
    bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    return min([wanted, *bounds]), hard

"""A library at work on a user's file, in a forked process with bounds: one that never ends or takes all memory is a finding.

Forked, because it has to import nothing then: a hundredth of a second instead of two. What the process answers is bounded and
validated: the file may have taken it over.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from finetune_job.finding import Finding
from finetune_trainer.processes.child import ChildEnd, Exceeded, encode_answer, fork_answering, parse_answer, wait_for_answer

CPU_SECONDS = 300
"""Of a call. The slowest honest one, converting an old sentencepiece vocabulary of 256,000 pieces, takes about a minute."""
WALL_SECONDS = 1800.0
"""On a machine that gives a process a sixth of a CPU."""
DATA_BYTES = 4 << 30
"""Memory that a call may take besides what is held already. The largest honest tokenizers take less than 1 GiB."""
ANSWER_BYTES = 4 << 20
"""Of all findings together. The longest honest ones show a setting that a manifest holds, some tens of KB."""
_SECONDS_TO_DIE = 5
"""Of CPU time, for a process that handles SIGXCPU."""
_FINDINGS = TypeAdapter(list[Finding])


class SandboxEndedError(Exception):
    """The process was ended by its bounds, or by the library itself. The message says which."""


def run_sandboxed(work: Callable[[], list[Finding]]) -> list[Finding]:
    """What `work` finds; it changes nothing in this process. Raises SandboxEndedError."""
    end = wait_for_answer(fork_answering(lambda: _work(work), ANSWER_BYTES), WALL_SECONDS)
    if not end.has_answered:
        raise SandboxEndedError(how_it_ended(end))
    try:
        return parse_answer(end.answer, _FINDINGS)
    except ValueError as error:
        raise SandboxEndedError("ends with an answer that is not a list of findings") from error


def limit_this_process(cpu_seconds: int | None = None) -> None:
    """Bound CPU time (to CPU_SECONDS unless another bound is given) and memory from here on, for this process alone."""
    held = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(held.ru_utime + held.ru_stime)
    soft, hard = _lowered(resource.RLIMIT_CPU, spent + (cpu_seconds or CPU_SECONDS))
    # SIGXCPU comes first, and says why; SIGKILL follows for code that ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (soft, min(hard, soft + _SECONDS_TO_DIE)))
    limit_memory()


def limit_memory() -> None:
    """Bound memory alone: what asks for more gets a MemoryError, or ends the process. Nothing in it can raise the bound again."""
    soft, _ = _lowered(resource.RLIMIT_DATA, _data_bytes() + DATA_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def how_it_ended(end: ChildEnd) -> str:
    """In words, as what the work in the process does."""
    if end.exceeded is Exceeded.TIME:
        return f"does not end within {WALL_SECONDS:.0f} s"
    if end.exceeded is not None:
        return f"{end.exceeded.value}, and was killed"
    if end.code == -signal.SIGXCPU:
        return f"takes more than {CPU_SECONDS} s of CPU time"
    if end.code in (-signal.SIGKILL, -signal.SIGABRT):
        return f"takes more memory than there is, or than {DATA_BYTES >> 30} GiB ({signal.Signals(-end.code).name})"
    return f"ends the process ({signal.Signals(-end.code).name})" if end.code < 0 else f"ends the process with status {end.code}"


def _work(work: Callable[[], list[Finding]]) -> bytes:
    limit_this_process()
    return encode_answer(_FINDINGS.dump_python(work(), mode="json"))


def _data_bytes() -> int:
    """Private memory of this process that can be written, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _lowered(which: int, wanted: int) -> tuple[int, int]:
    """Soft limit, never above what is set already, and the hard limit that is set; one that is not set is the largest number."""
    soft, hard = (sys.maxsize if bound == resource.RLIM_INFINITY else bound for bound in resource.getrlimit(which))
    return min(wanted, soft, hard), hard

"""Runs a library on a user's file in a forked process with limits on time, memory and output; exceeding one gives a finding.

A fork needs no imports, so it takes a hundredth of a second instead of two seconds. The answer is bounded and validated, since
the file may have taken control of the process.
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
"""Maximum CPU time of a call. The slowest legitimate call, converting an old sentencepiece vocabulary of 256,000 pieces, takes
about a minute.
"""
WALL_SECONDS = 1800.0
"""Maximum wall-clock time of a call. It lets a process that gets a sixth of a CPU use all of CPU_SECONDS."""
DATA_BYTES = 4 << 30
"""Additional memory that a call may take. The largest legitimate tokenizers take less than 1 GiB."""
ANSWER_BYTES = 4 << 20
"""Maximum number of bytes of all findings. The longest legitimate ones quote a setting of a manifest, a few tens of KB."""
_SECONDS_TO_DIE = 5
"""CPU time that a process gets after SIGXCPU, if it handles that signal, before it is killed."""
_FINDINGS = TypeAdapter(list[Finding])


class SandboxEndedError(Exception):
    """The process exceeded its bounds, or the library itself ended it. The message says which."""


def run_sandboxed(work: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of `work`, which changes nothing in this process. Raises SandboxEndedError."""

    def bounded() -> bytes:
        limit_this_process()
        return encode_answer(_FINDINGS.dump_python(work(), mode="json"))

    end = wait_for_answer(fork_answering(bounded, ANSWER_BYTES), WALL_SECONDS)
    if not end.has_answered:
        raise SandboxEndedError(how_it_ended(end))
    try:
        return parse_answer(end.answer, _FINDINGS)
    except ValueError as error:
        raise SandboxEndedError("ends with an answer that is not a list of findings") from error


def limit_this_process(cpu_seconds: int | None = None) -> None:
    """Limit the CPU time (CPU_SECONDS by default) and the memory that this process alone may use from now on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(usage.ru_utime + usage.ru_stime)
    soft, hard = _lowered(resource.RLIMIT_CPU, spent + (cpu_seconds or CPU_SECONDS))
    # SIGXCPU comes first and shows the cause. SIGKILL follows for code that ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (soft, min(hard, soft + _SECONDS_TO_DIE)))
    limit_memory()


def limit_memory() -> None:
    """Limit only memory, until this process ends. Exceeding the limit raises MemoryError or ends the process."""
    status = Path("/proc/self/status").read_text().splitlines()
    # Writable private memory, as RLIMIT_DATA counts it.
    used = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:")), 0)
    soft, _ = _lowered(resource.RLIMIT_DATA, used + DATA_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def how_it_ended(end: ChildEnd) -> str:
    """Describe the end as a predicate, such as "ends the process", whose subject is the work of the process."""
    if end.exceeded is Exceeded.TIME:
        return f"does not end within {WALL_SECONDS:.0f} s"
    if end.exceeded is not None:
        return f"{end.exceeded.value}, and was killed"
    if end.code == -signal.SIGXCPU:
        return f"takes more than {CPU_SECONDS} s of CPU time"
    if end.code in (-signal.SIGKILL, -signal.SIGABRT):
        return f"takes more memory than there is, or than {DATA_BYTES >> 30} GiB ({signal.Signals(-end.code).name})"
    return f"ends the process ({signal.Signals(-end.code).name})" if end.code < 0 else f"ends the process with status {end.code}"


def _lowered(which: int, wanted: int) -> tuple[int, int]:
    """Return the soft limit, lowered to at most `wanted`, and the current hard limit. An unset limit is the largest number."""
    soft, hard = (sys.maxsize if bound == resource.RLIM_INFINITY else bound for bound in resource.getrlimit(which))
    return min(wanted, soft, hard), hard

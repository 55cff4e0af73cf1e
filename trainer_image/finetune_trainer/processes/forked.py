"""Children of a process that has imported torch once, forked with bounds of time and memory.

The parent never computes with torch, so it has no threads whose locks a fork could copy. Children die with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from finetune_job.failures import FailureClass
from finetune_trainer.errors import classify
from finetune_trainer.files import open_regular
from finetune_trainer.processes.child import Child, ChildEnd, encode_answer, fork_answering, parse_answer, wait_for_ends

ANSWER_BYTES = 4 << 20
"""Maximum number of bytes in a child's answer. A plan and the list of its changes take a few tens of KB."""
LOOK_SECONDS = 0.25
"""Time between two checks of the children's bounds."""
MEASURE_SECONDS = 1.0
"""Time between two measurements of shared memory: the kernel walks all pages, which takes 15 ms for each process."""
_TAIL_BYTES = 2000


class BoundsExceededError(Exception):
    """Time or memory ran out; the message says which."""


@dataclass
class ResourceBounds:
    """Bounds for a process and its children together. deadline, began: on the monotonic clock."""

    deadline: float
    memory_bytes: int
    processor_seconds: float = math.inf
    """Limit on CPU time since this process began. Unlike clock time, CPU time does not advance while other processes compute."""
    began: float = field(default_factory=time.monotonic)
    peak_memory_bytes: int = field(default=0, init=False)
    _measured: float = field(default=-math.inf, init=False)

    def look(self, processes: list[int]) -> None:
        """Check the bounds. Raises BoundsExceededError."""
        now = time.monotonic()
        # The sum of resident sizes is cheap to read and never too small, so it shows when the exact size must be measured.
        may_exceed = sum(resident_bytes(process) for process in processes) > self.memory_bytes
        if may_exceed or now >= self._measured + MEASURE_SECONDS:
            self._measured = now
            taken = sum(proportional_bytes(process) for process in processes)
            self.peak_memory_bytes = max(self.peak_memory_bytes, taken)
            if taken > self.memory_bytes:
                raise BoundsExceededError(f"it took more than {self.memory_bytes / 2**30:.1f} GiB of memory")
        if now > self.deadline:
            raise BoundsExceededError("it did not end in time")
        used = used_processor_seconds() + sum(processor_seconds(process) for process in processes if process != os.getpid())
        if used > self.processor_seconds:
            raise BoundsExceededError(f"it took more than {self.processor_seconds:g} s of processor time")


class ChildResult(BaseModel):
    """How a child ended. Its answer is the value that its task returned, or the error that the task raised."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    code: int = 0
    """Exit status; a negative value is the signal that killed the child."""
    value: Any = None
    """The value that the child's task returned."""
    error: str = ""
    """Type and message of the error that the task raised."""
    message: str = ""
    """Message of the error that the task raised."""
    hint: str = ""
    failure: FailureClass | None = None
    """Failure class of the error that the task raised."""
    log_tail: str = ""
    seconds: float = 0.0
    """Time from the child's fork to the child's end, in seconds."""

    @property
    def problem(self) -> str:
        """Description of the failure; empty if the task returned."""
        if self.code == 0:
            return ""
        if self.error:
            return self.error
        ended = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with code {self.code}"
        return f"a process {ended}; the end of its output: {self.log_tail[-400:].strip()}"


_ANSWER = TypeAdapter(ChildResult)


def run_children(
    tasks: Mapping[str, Callable[[], Any]], scratch: Path, bounds: ResourceBounds, *, together: bool
) -> dict[str, ChildResult]:
    """Run each task in a child; tasks return JSON values. together: kill the other children when one fails.

    Raises BoundsExceededError. No child is left running, whatever happens.
    """
    ended: dict[str, ChildResult] = {}
    with ExitStack() as stack:
        children: dict[Child, str] = {}
        for name, task in tasks.items():
            children[stack.enter_context(fork_answering(partial(_work, task, _log(scratch, name)), ANSWER_BYTES))] = name
        # No deadline is given here, because bounds.look checks the time too.
        for ended_child in wait_for_ends(list(children), float("inf"), LOOK_SECONDS):
            if ended_child is None:
                bounds.look([os.getpid(), *(child.pid for child in children)])
                continue
            name = children.pop(ended_child[0])
            ended[name] = _ended(ended_child[1], _log(scratch, name))
            if together and ended[name].code != 0:
                return ended | {other: ChildResult(code=-signal.SIGKILL) for other in children.values()}
    return ended


def _log(scratch: Path, name: str) -> Path:
    return scratch / f"{name}.log"


def _work(task: Callable[[], Any], log: Path) -> bytes:
    """Run the task in the child, and return the encoded answer."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    torch.set_num_threads(1)
    try:
        return encode_answer({"value": task()})
    except BaseException as error:  # noqa: BLE001 - every error goes to the parent
        traceback.print_exc()
        failure, hint = classify(error)
        described = {"error": f"{type(error).__name__}: {error}", "message": str(error), "hint": hint, "failure": failure.value}
        return encode_answer(described)


def _ended(end: ChildEnd, log: Path) -> ChildResult:
    if end.exceeded is not None:
        result = ChildResult(code=1, error=f"a process {end.exceeded.value}")
    elif end.code != 0:
        result = ChildResult(code=end.code)
    else:
        try:
            result = parse_answer(end.answer, _ANSWER)
            # The process ended by itself, so the code depends only on whether its task raised an error.
            result = result.model_copy(update={"code": 1 if result.error else 0})
        except ValueError:
            result = ChildResult(code=1, error="a process answered with something other than a result")
    tail = ""
    if result.code != 0:
        with contextlib.suppress(OSError), open_regular(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES).decode(errors="replace")
    return result.model_copy(update={"log_tail": tail, "seconds": end.seconds})


def used_processor_seconds() -> float:
    """CPU time used so far by this process and by its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def processor_seconds(process: int) -> float:
    """CPU time that a process has used, in user and system mode; 0 if the kernel does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Fields 14 and 15 of proc(5)'s stat, counted after the name, which may contain spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def resident_bytes(process: int) -> int:
    """Memory of a process including all shared pages, an upper bound on `proportional_bytes`; 0 if the kernel does not
    report it.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def proportional_bytes(process: int) -> int:
    """Memory of a process, each page divided by the number of processes that share it; 0 if the kernel does not report it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0

"""Children of a process that has imported torch once, forked within bounds of time and memory.

The parent never computes with torch, so it has no threads whose locks a fork could copy. Children die with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_job.failures import FailureClass
from finetune_trainer.errors import classify
from finetune_trainer.processes.start import die_with

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.25
"""Between two looks at the memory of the children."""
_TAIL_BYTES = 2000


class BoundsExceededError(Exception):
    """Time or memory ran out; the message says which."""


@dataclass
class Bounds:
    """What a rehearsal may take. `deadline`: on the monotonic clock."""

    deadline: float
    memory_bytes: int
    peak_memory_bytes: int = field(default=0, init=False)

    def look(self, processes: list[int]) -> None:
        """Raises BoundsExceededError."""
        now = sum(proportional_bytes(process) for process in processes)
        self.peak_memory_bytes = max(self.peak_memory_bytes, now)
        if now > self.memory_bytes:
            raise BoundsExceededError(f"it took more than {self.memory_bytes / 2**30:.1f} GiB of memory")
        if time.monotonic() > self.deadline:
            raise BoundsExceededError("it did not end in time")


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    code: int
    """Negative: the signal."""
    value: Any = None
    """What its body returned."""
    error: str = ""
    """What it raised: type and message."""
    message: str = ""
    """What it raised: message alone."""
    hint: str = ""
    failure: FailureClass | None = None
    """Class of what it raised."""
    log_tail: str = ""
    seconds: float = 0.0
    """From its fork to its end."""

    @property
    def problem(self) -> str:
        """Empty where the body returned."""
        if self.code == 0:
            return ""
        if self.error:
            return self.error
        ended = f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"a process {ended}; its last words: {self.log_tail[-400:].strip()}"


def run_children(bodies: Mapping[str, Callable[[], Any]], scratch: Path, bounds: Bounds, *, together: bool) -> dict[str, Ended]:
    """Run each body in a child; what they return must be JSON. `together`: when one fails the others are killed.

    Raises BoundsExceededError; no child is left on any path.
    """
    children: dict[int, str] = {}
    ended: dict[str, Ended] = {}
    descriptors: dict[int, int] = {}
    started = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for name, body in bodies.items():
            child = _fork(body, scratch / name)
            children[child] = name
            descriptors[os.pidfd_open(child)] = child
        while descriptors:
            ready, _, _ = select.select(list(descriptors), [], [], LOOK_SECONDS)
            for descriptor in ready:
                child = descriptors.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(child, 0)
                name = children.pop(child)
                ended[name] = _read(scratch / name, os.waitstatus_to_exitcode(status), time.monotonic() - started)
                if together and ended[name].code != 0:
                    return ended | {name: Ended(-signal.SIGKILL) for name in children.values()}
            bounds.look([os.getpid(), *children])
        return ended
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(body: Callable[[], Any], result: Path) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import torch

        torch.set_num_threads(1)
        try:
            answer = {"value": body()}
            code = 0
        except BaseException as error:  # noqa: BLE001 - whatever it was goes to the parent
            traceback.print_exc()
            failure, hint = classify(error)
            answer = {
                "error": f"{type(error).__name__}: {error}",
                "message": str(error),
                "hint": hint,
                "failure": failure.value,
            }
        result.with_suffix(".json").write_text(json.dumps(answer))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Nothing of the parent's may run a second time, and threads of libraries must not hold up the end.
        os._exit(code)


def _read(result: Path, code: int, seconds: float) -> Ended:
    tail = ""
    if code != 0:
        with contextlib.suppress(OSError):
            tail = result.with_suffix(".log").read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    try:
        answer = json.loads(result.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return Ended(code or 1, log_tail=tail, seconds=seconds)
    failure = answer.pop("failure", None)
    return Ended(code, log_tail=tail, seconds=seconds, failure=None if failure is None else FailureClass(failure), **answer)


def proportional_bytes(process: int) -> int:
    """Memory of a process, each page divided by how many processes share it; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0

"""Starts and ends processes of the trainer.

Processes end with their parent, and avoid importing torch if they can. Libraries create a million objects; garbage collection and
process exit skip these.
"""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

if TYPE_CHECKING:
    # Importing this takes a tenth of a second, which processes without a plan avoid.
    from finetune_job.plan.run_plan import RunPlan

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
"""Options of prctl(2)."""
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables that keep numpy's linear algebra and tokenizers from starting threads. A process that may fork sets them
before it imports either library.
"""
NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Environment variable that keeps transformers from warning that torch is missing."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before the call, so no signal comes
        os._exit(1)


def send_output_to(descriptor: int) -> None:
    """Send this process's output, including that of native libraries, to a descriptor line by line, and close the descriptor."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def answer_on_stdout() -> BinaryIO:
    """Open standard output for this process's answer. From then on, output of libraries goes to standard error."""
    sys.stdout.flush()
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answer


def name_process(name: str) -> None:
    """Name this process for `ps` and /proc/PID/comm; a fork keeps its parent's command line. name: at most 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def name_of_process(pid: int) -> str:
    """The name that `name_process` gave a process; empty if it has ended, even if it is still a zombie."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except OSError:
        return ""
    return "" if after.startswith(("Z", "X")) else before.partition(" (")[2]


def start_no_threads() -> None:
    """Keep libraries that are not imported yet from starting threads, unless the environment says otherwise."""
    for name, value in NO_THREADS.items():
        os.environ.setdefault(name, value)


def keep_torch_out() -> None:
    """Make imports of torch in this process raise ImportError, unless it is already imported."""
    if "torch" not in sys.modules:
        _keep_out("torch")
        os.environ[NO_ADVICE] = "1"


def torch_is_here() -> bool:
    """Whether this process has imported torch."""
    return sys.modules.get("torch") is not None


def keep_bitsandbytes_out(plan: RunPlan | None = None) -> None:
    """Make imports of bitsandbytes in this process raise ImportError, unless it is already imported or the plan may need it.

    plan: None if this process does not need bitsandbytes.

    PEFT imports bitsandbytes if it is installed. This also imports torch's compiler, and takes a fifth of the CPU time of a
    rank's imports.
    """
    if (plan is None or not may_need_bitsandbytes(plan)) and "bitsandbytes" not in sys.modules:
        _keep_out("bitsandbytes")


def may_need_bitsandbytes(plan: RunPlan) -> bool:
    """Whether the plan quantizes its base, or has remote code, whose imports are unknown."""
    return plan.method.quantization is not None or plan.model.allow_remote_code


def _keep_out(module: str) -> None:
    # The documented way: https://docs.python.org/3/reference/import.html#the-module-cache. `find_spec` then finds nothing.
    sys.modules[module] = None  # type: ignore[assignment]


def preload(*modules: str) -> None:
    """Import the modules that this process will need, and exclude their objects from garbage collection permanently.

    Objects of torch and the libraries around it live as long as the process, so searching them would free nothing.
    """
    start_no_threads()
    gc.disable()
    try:
        for module in modules:
            import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def end(code: int) -> NoReturn:
    """End this process at once, after flushing its output.

    A normal exit tears down every module, which costs two seconds of CPU with torch, and threads of collective libraries can keep
    a failed process from ending. Code that must run at the end is in the caller's context managers, not in `atexit`.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""How much memory the GPUs of this machine have: of a run that no profile describes, nobody else could say."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from finetune_job.plan.run_plan import RunPlan
from finetune_memory.limit import MemoryLimit
from finetune_memory.verdict import limit_of

SECONDS = 30.0
"""Of the driver's answer, which takes a tenth of one where the driver is loaded already."""
# The driver's own program: a library would leave a CUDA context in this process, which its forks cannot use.
_PROGRAM = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def limit_here(plan: RunPlan) -> MemoryLimit | None:
    """By the plan's placement; without one, of the smallest GPU that processes of this machine see. None if nothing says."""
    limit = limit_of(plan)
    if limit is not None or plan.placement is not None:
        return limit
    sizes = _device_mebibytes(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not sizes:
        return None
    return MemoryLimit(min(sizes) * 2**20, is_device=True, source="the smallest GPU of this machine", devices=len(sizes))


def _device_mebibytes(visible: str | None) -> Sequence[int]:
    """Of each GPU. visible: numbers or names of those that may be used; None: all. Empty if there are none."""
    chosen = () if visible is None else (f"--id={visible.strip()}",)
    if chosen in (("--id=",), ("--id=-1",)):
        return ()
    try:
        done = subprocess.run([*_PROGRAM, *chosen], capture_output=True, text=True, timeout=SECONDS, check=True)
        return [int(line) for line in done.stdout.split() if int(line) > 0]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()

"""Lists the GPUs of the machine on which this process runs, as reported by the driver's own program.

A library would leave a CUDA context in this process, which forked processes cannot use, and commands run without torch.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

DRIVER_SECONDS = 30.0
"""Time limit for the driver's answer, which takes a tenth of a second if the driver is already loaded."""
_PROGRAM = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def gpu_mebibytes() -> Sequence[int]:
    """List the memory in MiB of each GPU that CUDA_VISIBLE_DEVICES lets this process use; empty without a GPU or a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = () if visible is None else (f"--id={visible.strip()}",)
    if chosen in (("--id=",), ("--id=-1",)):
        return ()
    try:
        done = subprocess.run([*_PROGRAM, *chosen], capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
        return [int(line) for line in done.stdout.split() if int(line) > 0]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()

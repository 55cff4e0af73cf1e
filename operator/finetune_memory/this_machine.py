"""The GPUs of the machine on which this process runs, as their driver's own program says.

A library would leave a CUDA context in this process, which its forks cannot use; and commands do without torch.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

DRIVER_SECONDS = 30.0
"""Of the driver's answer, which takes a tenth of one where the driver is loaded already."""
_PROGRAM = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def gpu_mebibytes() -> Sequence[int]:
    """Of each GPU that CUDA_VISIBLE_DEVICES lets a process use. Empty if there are none, or nothing says so."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = () if visible is None else (f"--id={visible.strip()}",)
    if chosen in (("--id=",), ("--id=-1",)):
        return ()
    try:
        done = subprocess.run([*_PROGRAM, *chosen], capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
        return [int(line) for line in done.stdout.split() if int(line) > 0]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()

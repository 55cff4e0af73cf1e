"""Whether this machine has GPUs, asked of the driver's own program, because commands do without torch."""

from __future__ import annotations

import os
import subprocess

_PROGRAM = ("nvidia-smi", "-L")
_SECONDS = 30.0
"""For an answer that takes a tenth of one if the driver is loaded already."""


def has_gpu() -> bool:
    """Whether ranks of this machine find one. False if that cannot be found out."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    try:
        done = subprocess.run(_PROGRAM, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and done.stdout.startswith(b"GPU ")

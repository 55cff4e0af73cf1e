"""What a process of preflight does first: it dies with the one that started it, and it leaves torch out where it can."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2)."""
NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Keeps transformers from saying that torch is missing."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def keep_torch_out() -> None:
    """Make every import of torch in this process an ImportError, unless it is there already."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ[NO_ADVICE] = "1"


def torch_is_kept_out() -> bool:
    """Whether an import of torch would fail because of `keep_torch_out`."""
    return "torch" in sys.modules and sys.modules["torch"] is None

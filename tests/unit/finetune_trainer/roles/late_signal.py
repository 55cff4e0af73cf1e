"""The trainer, told to stop, or with a rank killed, when all of its two ranks have reported their success and not ended yet."""

from __future__ import annotations

import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

SIGNAL = "SIGNAL"
"""Environment variable: SIGTERM for the supervisor, or SIGKILL for the last rank."""
_SECONDS = 30.0


def late(original: Any, supervisor: int, directory: Path, report: Any) -> None:
    original(directory, report)
    deadline = time.monotonic() + _SECONDS
    while len(list(directory.glob("rank-*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    if report.rank == 1 and os.environ[SIGNAL] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if report.rank == 0 and os.environ[SIGNAL] == "SIGTERM":
        os.kill(supervisor, signal.SIGTERM)
    # Until the agent has told the ranks.
    time.sleep(1.0)


if __name__ == "__main__":
    from functools import partial

    from finetune_trainer.train import rank

    # Ranks are forks of this process.
    rank.write_rank_report = partial(late, rank.write_rank_report, os.getpid())
    runpy.run_module("finetune_trainer", run_name="__main__", alter_sys=True)

"""The trainer, told to stop, or with a rank killed, when all of its two ranks have reported their success and not ended yet.

Started as a program it is the supervisor; the process that ranks are forks of imports this module, too.
"""

import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

SIGNAL, SUPERVISOR = "SIGNAL", "SUPERVISOR"
"""Environment variables: SIGTERM for the supervisor, or SIGKILL for the last rank; and the supervisor's process id."""
_SECONDS = 30.0


def late(original: Any, directory: Path, report: Any) -> None:
    original(directory, report)
    deadline = time.monotonic() + _SECONDS
    while len(list(directory.glob("rank-*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    if report.rank == 1 and os.environ[SIGNAL] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if report.rank == 0 and os.environ[SIGNAL] == "SIGTERM":
        os.kill(int(os.environ[SUPERVISOR]), signal.SIGTERM)
    # Until the agent has told the ranks.
    time.sleep(1.0)


if __name__ == "__main__":
    from finetune_trainer.roles import torchrun

    os.environ[SUPERVISOR] = str(os.getpid())
    torchrun.PRELOADED += ",tests.unit.finetune_trainer.roles.late_signal"
    runpy.run_module("finetune_trainer", run_name="__main__", alter_sys=True)
elif SUPERVISOR in os.environ:
    from functools import partial

    from finetune_trainer.train import rank

    rank.write_rank_report = partial(late, rank.write_rank_report)

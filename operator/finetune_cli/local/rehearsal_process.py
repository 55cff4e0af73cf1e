"""The rehearsal as a process of the trainer, which tells by lines of JSON what it has found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_cli.local.launch import Interruption
from finetune_job.plan.run_plan import RunPlan

_PROCESS = "finetune_trainer.roles.rehearse"


@dataclass(frozen=True)
class RehearsalOrder:
    """What is tried."""

    plan: RunPlan
    model: Path
    scratch: Path
    """Made, and removed by the caller."""
    log: Path
    seconds: float
    """Of the whole attempt; what is not tried by then is not tried."""

    def command(self) -> list[str]:
        """Arguments of the process."""
        command = [sys.executable, "-m", _PROCESS, "--parent", str(os.getpid()), "--check-model"]
        return [*command, "--model", str(self.model), "--scratch", str(self.scratch), "--seconds", str(self.seconds)]


def run_rehearsal(order: RehearsalOrder, interruption: Interruption, said: Callable[[Mapping[str, Any]], None]) -> int:
    """Run it to its end; the exit status. `said`: each line, with one of `finding`, `stage`, `report`, `shown`."""
    with order.log.open("wb") as log:
        process = subprocess.Popen(
            order.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=_environment()
        )
        interruption.watch(process)
        try:
            if process.stdin is not None:
                process.stdin.write(order.plan.model_dump_json().encode())
                process.stdin.close()
            for line in process.stdout or ():
                said(json.loads(line))
            return process.wait()
        finally:
            interruption.watch(None)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _environment() -> dict[str, str]:
    """No accelerator, and one thread for each rank."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

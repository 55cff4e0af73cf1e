"""Answers of the trainer's process for audits: the parts of a run, and differences between two directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.launch import Interruption, running
from finetune_job.finding import Finding

_PROGRAM = "finetune_trainer.roles.audit"


@dataclass(frozen=True)
class AuditedParts:
    """Parts of a run that can be computed again and compared, and findings against that."""

    findings: tuple[Finding, ...]
    steps: tuple[int, ...]
    """Steps of valid checkpoints, in order."""
    world_size: int | None
    """Ranks that wrote the last of them."""
    best_step: int | None
    """The best checkpoint that the last one names."""
    exported_step: int | None
    """Step of the trained result; None: the run has none yet."""
    devices: tuple[str, ...]

    @property
    def is_refused(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)


@dataclass(frozen=True)
class AuditedPlan:
    """The frozen plan of a run, and the directory in which its claims are."""

    path: Path
    sha256: str
    claims_root: Path

    def arguments(self) -> list[str]:
        """Arguments of the process."""
        return ["--plan", str(self.path), "--plan-sha256", self.sha256, "--claims-root", str(self.claims_root)]


def inspect_run(plan: AuditedPlan, interruption: Interruption) -> AuditedParts:
    """Look at all parts of a run. Raises LocalError."""
    answer = _answer(["look", *plan.arguments()], interruption)
    last = answer["checkpoints"][-1] if answer["checkpoints"] else {}
    return AuditedParts(
        tuple(Finding.model_validate(finding) for finding in answer["findings"]),
        tuple(each["step"] for each in answer["checkpoints"]),
        last.get("world_size"),
        last.get("best_step"),
        answer["exported_step"],
        tuple(answer["devices"]),
    )


def difference(what: str, expected: Path, other: Path, interruption: Interruption) -> str | None:
    """The first difference. what: `checkpoints` or `results`. Raises LocalError."""
    answer = _answer([what, "--expected", str(expected), "--found", str(other)], interruption)["difference"]
    return None if answer is None else str(answer)


def merged_difference(plan: AuditedPlan, other: Path, interruption: Interruption) -> str | None:
    """The first difference between the merged model of a run and one that was made again. Raises LocalError."""
    answer = _answer(["merged", *plan.arguments(), "--found", str(other)], interruption)["difference"]
    return None if answer is None else str(answer)


def _answer(arguments: Sequence[str], interruption: Interruption) -> dict[str, Any]:
    command = [sys.executable, "-m", _PROGRAM, "--parent", str(os.getpid()), *arguments]
    # Looking for plugins of pydantic reads the metadata of every installed distribution.
    options: dict[str, Any] = {"env": {**os.environ, "PYDANTIC_DISABLE_PLUGINS": "__all__"}, "start_new_session": True}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(subprocess.Popen(command, **pipes, **options), interruption) as process:
        answer, errors = process.communicate()
    if interruption.requested:
        raise LocalError("interrupted; nothing was changed", ExitCode.INTERRUPTED)
    if process.returncode != 0:
        reason = errors.decode(errors="replace").strip() or f"it ended with status {process.returncode}"
        raise LocalError(f"the run cannot be compared: {reason}", ExitCode.FAILED)
    return dict(json.loads(answer))

"""Runs the merge and the rehearsal as processes of the trainer, which report progress and findings as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.launch import Interruption, running, start, trainer_command
from finetune_job.api.enumerations import MergeBase
from finetune_job.failures import CLASS_OF_EXIT_CODE, USER_FAILURES
from finetune_job.plan.run_plan import RunPlan

_TAIL_BYTES = 4096
"""Number of bytes at the end of the process's standard error to show if the process ended without a report."""
LONGEST_LINE_BYTES = 16 << 20
"""Maximum length of a line that is read. The longest line is a merge's report, which names every kind of tensor."""
_WRONG_ARGUMENTS = 2


@dataclass(frozen=True)
class MergeOrder:
    """Arguments of a merge."""

    base: Path
    adapters: Sequence[Path]
    """Adapters, in the order in which they are merged."""
    output: Path
    dtype: str | None
    max_shard_size: str
    verify: bool
    prompts: Path | None
    device: str
    base_form: MergeBase = MergeBase.ORIGINAL
    quantization: str | None = None
    """How QLoRA training packed its base, as JSON of spec.method.quantization; None: not at all, or with the defaults."""
    force: bool = False
    """Whether to merge an adapter that was trained on another base, or that has no effect."""

    def command(self) -> list[str]:
        """Return the command of the process."""
        options = [
            ("base", self.base),
            *(("adapter", adapter) for adapter in self.adapters),
            ("output", self.output),
            ("max-shard-size", self.max_shard_size),
            ("device", self.device),
            ("dtype", self.dtype),
            ("prompts", self.prompts),
            ("base-form", None if self.base_form is MergeBase.ORIGINAL else self.base_form),
            ("quantization", self.quantization),
        ]
        words = [word for name, value in options if value is not None for word in (f"--{name}", str(value))]
        return trainer_command("finetune_trainer.roles.merge_command", *words, *self._flags())

    def _flags(self) -> list[str]:
        return [flag for flag, is_set in (("--no-verify", not self.verify), ("--force", self.force)) if is_set]


@dataclass(frozen=True)
class MergeEnd:
    """How a merge ended."""

    exit_code: ExitCode
    report: Mapping[str, Any]
    """Report of the process; empty if it ended before it had a report."""
    said: str
    """Error message of the process."""


def merge_directories(
    command: Sequence[str], interruption: Interruption, progressed: Callable[[int, int], None], ended_writing: Callable[[], None]
) -> MergeEnd:
    """Run a merge until it ends.

    `progressed`: is called with the number of bytes written so far and the size of the whole model. `ended_writing`: is called
    before the verification.
    """
    report: Mapping[str, Any] = {}
    with tempfile.TemporaryFile() as errors:
        with running(start(command, stdout=subprocess.PIPE, stderr=errors), interruption) as process:
            for line in json_lines(process.stdout):
                if isinstance(line.get("report"), dict):
                    report = line["report"]
                elif isinstance(line.get("written"), int) and isinstance(line.get("total"), int):
                    progressed(line["written"], line["total"])
                    if line["written"] == line["total"]:
                        ended_writing()
            code = process.wait()
        if code == 0:
            return MergeEnd(ExitCode.DONE, report, "")
        end = errors.seek(0, os.SEEK_END)
        errors.seek(max(end - _TAIL_BYTES, 0))
        message = errors.read().decode(errors="replace").strip()
        if interruption.requested:
            return MergeEnd(ExitCode.INTERRUPTED, report, message)
        if code == _WRONG_ARGUMENTS:
            return MergeEnd(ExitCode.UNUSABLE, report, message)
        is_refused = CLASS_OF_EXIT_CODE.get(code) in USER_FAILURES
        return MergeEnd(ExitCode.REFUSED if is_refused else ExitCode.FAILED, report, message)


def json_lines(stream: IO[bytes] | None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects that a process writes, one per line. Skip all other lines, and lines that are too long."""
    is_rest = False
    while line := stream.readline(LONGEST_LINE_BYTES) if stream is not None else b"":
        was_rest, is_rest = is_rest, not line.endswith(b"\n")
        if was_rest or is_rest:
            continue
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content


def run_rehearsal(
    plan: RunPlan, arguments: Sequence[str], log_file: Path, interruption: Interruption, take: Callable[[Mapping[str, Any]], None]
) -> int:
    """Run a rehearsal until it ends, and return its exit status.

    take: is called with each line, which has one of `finding`, `stage`, `report`, `shown`.
    """
    command = trainer_command("finetune_trainer.roles.rehearse", *arguments)
    with log_file.open("wb") as log:
        # A rehearsal uses no accelerator, and one thread for each rank.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with running(start(command, env=environment, **pipes), interruption) as process:
            if process.stdin is not None:
                # If the process has ended at once, its log and its exit status say why.
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(plan.model_dump_json().encode())
            for line in json_lines(process.stdout):
                take(line)
            return process.wait()

"""The merge and the rehearsal as processes of the trainer, which report progress and findings as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.launch import Interruption, running
from finetune_job.api.enumerations import MergeBase
from finetune_job.failures import CLASS_OF_EXIT_CODE, USER_FAILURES
from finetune_job.plan.run_plan import RunPlan

_TAIL_BYTES = 4096
"""Bytes from the end of the process's standard error that are shown if it ended without a report."""
LONGEST_LINE_BYTES = 16 << 20
"""A report of a merge names every kind of tensor, and nothing else comes near to this."""
_WRONG_ARGUMENTS = 2
_PROCESS = "finetune_trainer.roles.rehearse"


@dataclass(frozen=True)
class MergeOrder:
    """Order of a merge."""

    base: Path
    adapters: Sequence[Path]
    """Merged one after the other."""
    output: Path
    dtype: str | None
    max_shard_size: str
    verify: bool
    prompts: Path | None
    device: str
    base_form: MergeBase = MergeBase.ORIGINAL
    quantization: str | None = None
    """How a QLoRA training packed its base, as JSON of spec.method.quantization; None: it did not, or by default."""

    def command(self) -> list[str]:
        """Arguments of the process."""
        command = [sys.executable, "-m", "finetune_trainer.roles.merge_command", "--parent", str(os.getpid())]
        command += ["--base", str(self.base)]
        for adapter in self.adapters:
            command += ["--adapter", str(adapter)]
        command += ["--output", str(self.output), "--max-shard-size", self.max_shard_size, "--device", self.device]
        if self.dtype is not None:
            command += ["--dtype", self.dtype]
        if self.prompts is not None:
            command += ["--prompts", str(self.prompts)]
        if self.base_form is not MergeBase.ORIGINAL:
            command += ["--base-form", self.base_form]
        if self.quantization is not None:
            command += ["--quantization", self.quantization]
        return command if self.verify else [*command, "--no-verify"]


@dataclass(frozen=True)
class MergeEnd:
    """The end of a merge."""

    exit_code: ExitCode
    report: Mapping[str, Any]
    """Empty where the process ended before it had one."""
    said: str
    """The error, in the words of the process."""


def merge_directories(
    command: Sequence[str], interruption: Interruption, progressed: Callable[[int, int], None], ended_writing: Callable[[], None]
) -> MergeEnd:
    """Run a merge to its end. `progressed`: bytes written, and in all. `ended_writing`: what follows is the verification."""
    report: Mapping[str, Any] = {}
    with tempfile.TemporaryFile() as errors:
        files: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "stdin": subprocess.DEVNULL}
        with running(subprocess.Popen(command, start_new_session=True, **files), interruption) as process:
            for said in json_lines(process.stdout):
                if isinstance(said.get("report"), dict):
                    report = said["report"]
                elif isinstance(said.get("written"), int) and isinstance(said.get("total"), int):
                    progressed(said["written"], said["total"])
                    if said["written"] == said["total"]:
                        ended_writing()
            code = process.wait()
        return MergeEnd(_exit_code_of_merge(code, interrupted=interruption.requested), report, _tail(errors) if code else "")


def json_lines(stream: IO[bytes] | None) -> Iterator[dict[str, Any]]:
    """The objects that a process writes, one a line. What is not one, as libraries may print it, or too long, is left out."""
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


def _exit_code_of_merge(code: int, *, interrupted: bool) -> ExitCode:
    if code == 0:
        return ExitCode.DONE
    if interrupted:
        return ExitCode.INTERRUPTED
    if code == _WRONG_ARGUMENTS:
        return ExitCode.UNUSABLE
    return ExitCode.REFUSED if CLASS_OF_EXIT_CODE.get(code) in USER_FAILURES else ExitCode.FAILED


def _tail(errors: IO[bytes]) -> str:
    end = errors.seek(0, os.SEEK_END)
    errors.seek(max(end - _TAIL_BYTES, 0))
    return errors.read().decode(errors="replace").strip()


@dataclass(frozen=True)
class RehearsalOrder:
    """Order of a rehearsal."""

    plan: RunPlan
    model: Path
    scratch: Path
    """Made, and removed by the caller."""
    log: Path
    seconds: float
    """Time limit of the whole rehearsal; what is not tried by then is skipped."""

    def command(self) -> list[str]:
        """Arguments of the process."""
        command = [sys.executable, "-m", _PROCESS, "--parent", str(os.getpid()), "--check-model"]
        return [*command, "--model", str(self.model), "--scratch", str(self.scratch), "--seconds", str(self.seconds)]


def run_rehearsal(order: RehearsalOrder, interruption: Interruption, take: Callable[[Mapping[str, Any]], None]) -> int:
    """Run it to its end, and return the exit status.

    take: is called with each line, which has one of `finding`, `stage`, `report`, `shown`.
    """
    with order.log.open("wb") as log:
        files: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "env": _environment()}
        with running(subprocess.Popen(order.command(), start_new_session=True, **files), interruption) as process:
            if process.stdin is not None:
                # One that has ended at once says why in its log and by its exit status.
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(order.plan.model_dump_json().encode())
            for line in json_lines(process.stdout):
                take(line)
            return process.wait()


def _environment() -> dict[str, str]:
    """No accelerator, and one thread for each rank."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

"""`python -m finetune_trainer.roles.rehearse`: the rehearsal in a process of its own, so that torch leaves memory with it.

Standard input: the plan. Standard output: one JSON object per line, `{"finding": ...}` and `{"stage": ...}` as they come and
`{"report": ...}` last. What libraries print goes to standard error. Called by preflight, and by finetune_cli.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, TypeAdapter

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.files import TEMPORARY_MARK, temporary_beside
from finetune_trainer.inspection.report import RehearsalReport, Verdict
from finetune_trainer.processes.child import encode_answer, parse_answer, start_answering, wait_for_answer
from finetune_trainer.processes.start import NO_ADVICE, die_with, end, keep_bitsandbytes_out, preload
from finetune_trainer.rehearsal.verdicts import not_done_finding

log = logging.getLogger(__name__)
SECONDS = 600.0
"""For all of it by the clock, from the start of the process: so that a pod that is starved ends, too."""
PROCESSOR_SECONDS = 110.0
"""For all of it on processors: what two ranks take in less than a minute on two of them, however busy these are."""
ENDING_SECONDS = 3.0
"""What it may take to end its children after that."""
MEMORY_BYTES = 3 << 30
ANSWER_BYTES = 4 << 20
"""Of all its lines together; a report takes some KB."""
NAME = "rehearsal"
"""Of the temporary directory on the workspace."""


class _AnswerLine(BaseModel):
    """A line of the answer; only the report is of interest here."""

    report: RehearsalReport | None = None


_LINE = TypeAdapter(_AnswerLine)


def rehearse_in_own_process(context: RunContext) -> RehearsalReport:
    """The verdict on a job whose model and settings preflight has accepted. Leaves nothing on the workspace."""
    workspace = context.workspace.root
    workspace.mkdir(parents=True, exist_ok=True)
    for leftover in workspace.glob(f"{NAME}{TEMPORARY_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = temporary_beside(workspace / NAME)
    scratch.mkdir()
    try:
        return _run(context, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(context: RunContext, scratch: Path) -> RehearsalReport:
    started = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != NO_ADVICE}
    command = [sys.executable, "-m", __spec__.name, "--parent", str(os.getpid()), "--model", str(context.base_model)]
    command += ["--scratch", str(scratch)]
    child = start_answering(command, environment | on_cpu(), context.plan.model_dump_json().encode(), ANSWER_BYTES)
    ended = wait_for_answer(child, SECONDS + ENDING_SECONDS)
    if ended.exceeded is not None:
        return _not_finished(f"it {ended.exceeded.value}", time.monotonic() - started, scratch)
    for line in reversed(ended.answer.splitlines()):
        try:
            answer = parse_answer(line, _LINE)
        except ValueError:
            break
        if answer.report is not None:
            return answer.report
    return _not_finished(f"its process ended with status {ended.code}; its log says why", time.monotonic() - started, scratch)


def on_cpu() -> dict[str, str]:
    """Variables of the process: no accelerator, and one thread for each rank."""
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _not_finished(reason: str, seconds: float, scratch: Path) -> RehearsalReport:
    return RehearsalReport(verdict=Verdict.NOT_DONE, seconds=round(seconds, 1), findings=(not_done_finding(reason, scratch),))


def main(argv: list[str] | None = None) -> int:
    """0: a report was written."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.rehearse", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    parser.add_argument("--model", type=Path, required=True, help="directory of the base model")
    parser.add_argument("--scratch", type=Path, required=True, help="empty directory; made where it does not exist")
    parser.add_argument("--seconds", type=float, help="for all of it by the clock; unset: a bound of processor time")
    parser.add_argument("--check-model", action="store_true", help="first look at the model, as preflight does")
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        plan = RunPlan.model_validate_json(sys.stdin.buffer.read())
        if arguments.check_model and not _is_accepted(plan, arguments.model, answer):
            return 0
        keep_bitsandbytes_out(plan)
        preload("finetune_trainer.rehearsal.run", "finetune_trainer.roles.merge")
        from finetune_trainer.processes.forked import ResourceBounds
        from finetune_trainer.rehearsal.run import rehearse
        from finetune_trainer.roles.merge import merge

        report = rehearse(
            plan,
            arguments.model.absolute(),
            arguments.scratch.absolute(),
            ResourceBounds(
                started + (arguments.seconds or SECONDS),
                MEMORY_BYTES,
                PROCESSOR_SECONDS if arguments.seconds is None else math.inf,
                started,
            ),
            merge=merge,
            on_stage=lambda stage: _write_line(answer, stage=stage.model_dump(mode="json")),
        )
        _write_line(answer, report=report.model_dump(mode="json"))
    return 0


def _is_accepted(plan: RunPlan, model: Path, answer: IO[str]) -> bool:
    """What preflight says of files, structure and settings before it would rehearse."""
    from finetune_trainer.inspection.model_files import inspect_model_files
    from finetune_trainer.preflight.model_process import check_model
    from finetune_trainer.processes.start import keep_torch_out

    files = inspect_model_files(model, plan.model.name)
    findings = list(files.findings)
    if files.digest:
        # In a process of its own, because this one must not compute with torch before it forks.
        keep_torch_out()
        try:
            findings += check_model(plan, model)[1]
        finally:
            del sys.modules["torch"]
    for finding in findings:
        _write_line(answer, finding=finding.model_dump(mode="json"))
    return not any(finding.severity == "error" for finding in findings)


def _write_line(answer: IO[str], **values: Any) -> None:
    answer.write(encode_answer(values).decode() + "\n")
    answer.flush()


if __name__ == "__main__":
    end(main())
